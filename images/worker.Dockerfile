# Libraries of functions with models, on processors or, if the packages are built for it, on CUDA.
ARG PARENT=fleetstart-base
FROM ${PARENT}
ARG PYTHON=3.11
# Devices that NVIDIA's runtime shows where a container asks for none: "void" is no driver at all.
ARG NVIDIA_VISIBLE_DEVICES=void
ENV NVIDIA_VISIBLE_DEVICES=${NVIDIA_VISIBLE_DEVICES} \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ADD packages.tar /opt/fleetstart/lib/python${PYTHON}/site-packages/
COPY sbom.cdx.json /opt/fleetstart/
# Fails here, and not at the first call, if the base is too old for the compiled modules.
RUN python -c "import fleetstart.native._core, numpy, torch"
# Its launcher holds a connection to the worker's first process, which notices sooner than any probe.
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "fleetstart.runtime.launch.container_worker"]
