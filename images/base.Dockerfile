# Python and an unprivileged user. `fs image build` gives BASE, PYTHON and the labels.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG PYTHON=3.11
RUN set -e; \
    python3 -c "import sys; v = '%d.%d' % sys.version_info[:2]; sys.exit(v != '${PYTHON}' and 'the base image has Python ' + v + ', and the packages are for ${PYTHON}')"; \
    python3 -m venv --without-pip /opt/fleetstart; \
    echo 'fleetstart:x:10001:10001:fleetstart:/var/lib/fleetstart:/usr/sbin/nologin' >> /etc/passwd; \
    echo 'fleetstart:x:10001:' >> /etc/group; \
    mkdir -p /var/lib/fleetstart; \
    chown 10001:10001 /var/lib/fleetstart; \
    chmod 0700 /var/lib/fleetstart
ENV PATH=/opt/fleetstart/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FS_HOME=/var/lib/fleetstart
WORKDIR /var/lib/fleetstart
USER 10001:10001
