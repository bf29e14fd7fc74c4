#!/bin/busybox sh
# Process 1 of a guest of the RDMA bed: loads modules, sees the host's root read-only under a throw-away overlay and the
# job's folder read-write, makes a software RDMA device on the link to the other guest, and runs the job.
# Parameters are on the kernel's command line: bed_rank (0 or 1) and bed_dir.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for word in $(cat /proc/cmdline); do
  case $word in bed_*=*) eval "${word%%=*}='${word#*=}'" ;; esac
done
stop() {
  sync
  poweroff -f
  sleep 60
}
port() {
  for one in /sys/class/virtio-ports/*; do
    if [ "$(cat "$one/name")" = "$1" ]; then echo "/dev/${one##*/}"; fi
  done
}
fail() {
  echo "guest $bed_rank: $*" | tee /dev/console
  echo 125 >"$(port status)"
  stop
}
while read -r module; do modprobe "$module" || echo "modprobe $module failed"; done </modules
options=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o $options,ro,cache=loose root /ro || fail "the host's root cannot be mounted"
mount -t tmpfs -o size=50% rw /rw
mkdir /rw/up /rw/work
mount -t overlay -o lowerdir=/ro,upperdir=/rw/up,workdir=/rw/work root /new || fail "no overlay"
mount -t 9p -o $options,cache=mmap dir "/new$bed_dir" || fail "the job's folder cannot be mounted"
for folder in proc sys dev; do mount -o bind /$folder /new/$folder; done
mkdir -p /new/dev/shm
mount -t tmpfs -o size=90% shm /new/dev/shm
mount -t tmpfs run /new/run
ulimit -l unlimited
ip link set lo up
ip link set eth0 up mtu 9000
ip addr add "198.18.0.$((bed_rank + 1))/24" dev eth0 # RFC 2544: addresses of benches, which lead nowhere
# A software device queues all packets of an answer at once; the default queue drops most of them.
chroot /new /sbin/tc qdisc replace dev eth0 root pfifo limit 100000 || fail "no queue of packets"
chroot /new /bin/rdma link add rxe0 type rxe netdev eth0 || fail "no software RDMA device"
echo "guest $bed_rank: ready after $(cut -d' ' -f1 /proc/uptime) s"
env -i BED_RANK="$bed_rank" chroot /new /bin/bash "$bed_dir/job.sh" >"/new$bed_dir/output.$bed_rank" 2>&1 </dev/null
status=$?
echo "guest $bed_rank: done after $(cut -d' ' -f1 /proc/uptime) s"
sync
umount "/new$bed_dir"
echo $status >"$(port status)"
stop
