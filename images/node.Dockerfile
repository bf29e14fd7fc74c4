# Node daemon and its workers, which run in namespaces inside the container.
ARG PARENT=fleetstart-worker
FROM ${PARENT}
ARG PYTHON=3.11
ADD packages.tar /opt/fleetstart/lib/python${PYTHON}/site-packages/
COPY sbom.cdx.json /opt/fleetstart/
COPY fs /opt/fleetstart/bin/fs
RUN python -c "import fleetstart.prefetcher.daemon"
HEALTHCHECK --interval=5s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-m", "fleetstart.images.healthcheck", "node"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "fleetstart.prefetcher"]
