/* As much of S3 as reading takes: GET, with or without a range, and HEAD of /bucket/key, out of a folder, with sendfile.
 *
 * A thread a connection, kept alive; whoever asks may read. It is the server of the benchmarks: quicker than any client,
 * and slower on purpose where it is told a rate, which all connections share. Prints its port and serves until its
 * input ends.
 *
 * range_server FOLDER BYTES_PER_S   (0: as fast as it goes) */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_MAX = 16384, PIECE = 1 << 20, PACED_PIECE = 1 << 17 };

static const char *folder;
static double bytes_per_s;
static double link_free_s; /* when the link has sent all that it was given */
static pthread_mutex_t link_lock = PTHREAD_MUTEX_INITIALIZER;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* Sleeps until the shared link has room for the piece. */
static void pace(size_t size) {
    pthread_mutex_lock(&link_lock);
    double now = now_s();
    if (link_free_s < now)
        link_free_s = now;
    link_free_s += size / bytes_per_s;
    double wait = link_free_s - now;
    pthread_mutex_unlock(&link_lock);
    struct timespec pause = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
    nanosleep(&pause, NULL);
}

static int send_all(int client, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(client, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return -1;
        data += sent, size -= sent;
    }
    return 0;
}

static int send_body(int client, int file, off_t at, off_t size) {
    off_t end = at + size;
    while (at < end) {
        size_t piece = end - at < (bytes_per_s ? PACED_PIECE : PIECE) ? end - at : (bytes_per_s ? PACED_PIECE : PIECE);
        if (bytes_per_s)
            pace(piece);
        for (off_t until = at + piece; at < until;) {
            ssize_t sent = sendfile(client, file, &at, until - at);
            if (sent <= 0 && errno != EINTR)
                return -1;
        }
    }
    return 0;
}

static int refuse(int client, const char *status, const char *code, int head) {
    char body[128], answer[512];
    int size = snprintf(body, sizeof body, "<Error><Code>%s</Code></Error>", code);
    int all = snprintf(answer, sizeof answer, "HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s",
                       status, size, head ? "" : body);
    return send_all(client, answer, all);
}

/* One request whose head is in `text`; -1 ends the connection. */
static int answer(int client, char *text) {
    char method[8], target[4096], path[8192];
    if (sscanf(text, "%7s %4095s", method, target) != 2)
        return -1;
    int head = !strcmp(method, "HEAD");
    if (!head && strcmp(method, "GET"))
        return refuse(client, "405 Method Not Allowed", "MethodNotAllowed", 0);
    target[strcspn(target, "?")] = 0;
    snprintf(path, sizeof path, "%s%s", folder, target);
    struct stat facts;
    int file = strstr(target, "..") ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &facts) || !S_ISREG(facts.st_mode)) {
        if (file >= 0)
            close(file);
        return refuse(client, "404 Not Found", "NoSuchKey", head);
    }
    long long first = 0, last = facts.st_size - 1;
    char *range = strcasestr(text, "\r\nrange: bytes=");
    if (range && sscanf(range + 15, "%lld-%lld", &first, &last) >= 1 && last >= facts.st_size)
        last = facts.st_size - 1;
    if (range && (first < 0 || first > last)) {
        close(file);
        return refuse(client, "416 Range Not Satisfiable", "InvalidRange", head);
    }
    char said[1024], when[64], place[128] = "";
    strftime(when, sizeof when, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&facts.st_mtime, &(struct tm){0}));
    if (range)
        snprintf(place, sizeof place, "Content-Range: bytes %lld-%lld/%lld\r\n", first, last, (long long)facts.st_size);
    int size = snprintf(said, sizeof said,
                        "HTTP/1.1 %s\r\nContent-Length: %lld\r\n%sETag: \"%llx-%llx\"\r\nLast-Modified: %s\r\n"
                        "Accept-Ranges: bytes\r\nContent-Type: binary/octet-stream\r\n\r\n",
                        range ? "206 Partial Content" : "200 OK", last - first + 1, place,
                        (unsigned long long)facts.st_ino, (unsigned long long)facts.st_mtim.tv_nsec, when);
    int failed = send_all(client, said, size) || (!head && send_body(client, file, first, last - first + 1));
    close(file);
    return failed ? -1 : 0;
}

static void *serve(void *argument) {
    int client = (int)(long)argument, on = 1;
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    char text[REQUEST_MAX + 1];
    size_t have = 0;
    for (;;) {
        text[have] = 0;
        char *end = strstr(text, "\r\n\r\n");
        if (!end) {
            ssize_t got = have < REQUEST_MAX ? recv(client, text + have, REQUEST_MAX - have, 0) : 0;
            if (got <= 0)
                break;
            have += got;
            continue;
        }
        end[2] = 0; /* the head ends with its last line */
        if (answer(client, text))
            break;
        have -= end + 4 - text;
        memmove(text, end + 4, have);
    }
    close(client);
    return NULL;
}

static void *accept_all(void *argument) {
    for (;;) {
        int client = accept4((int)(long)argument, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        if (client >= 0 && !pthread_create(&thread, NULL, serve, (void *)(long)client))
            pthread_detach(thread);
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 3)
        return 2;
    folder = arguments[1];
    bytes_per_s = atof(arguments[2]);
    signal(SIGPIPE, SIG_IGN);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 128) ||
        getsockname(listener, (struct sockaddr *)&address, &size))
        return 1;
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_t thread;
    pthread_create(&thread, NULL, accept_all, (void *)(long)listener);
    while (getchar() != EOF) {
    }
    return 0;
}
