# Gateway, management API and scheduler.
ARG PARENT=fleetstart-base
FROM ${PARENT}
ARG PYTHON=3.11
ADD packages.tar /opt/fleetstart/lib/python${PYTHON}/site-packages/
COPY sbom.cdx.json /opt/fleetstart/
COPY fs /opt/fleetstart/bin/fs
RUN python -c "import fleetstart.controller.app"
EXPOSE 7433
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "fleetstart.images.healthcheck", "controller"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "fleetstart.controller"]
