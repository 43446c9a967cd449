# syntax=docker/dockerfile:1
# Three things can be taken from this file:
#   docker build --target wheel -o dist .   the wheel alone, to install with [server] into the image of an engine of your own
#   docker build -t memsaver:0.1.0 .        the reference engine with torch's default (CUDA) build
#   docker build --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_FIND_LINKS=... -t memsaver:0.1.0 .

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/memsaver \
 && /opt/memsaver/bin/pip install --no-cache-dir -c constraints.txt scikit-build-core pybind11 cmake ninja
ENV PATH=/opt/memsaver/bin:$PATH
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY memsaver_core memsaver_core
COPY server server
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps -w /dist .

FROM scratch AS wheel
COPY --from=build /dist /

FROM python:${PYTHON}-slim-bookworm AS packages
ARG TORCH=torch
ARG PIP_FIND_LINKS=""
ARG PIP_EXTRA_INDEX_URL=""
COPY constraints.txt /tmp/
COPY --from=build /dist /dist
# The build tools stay behind: this stage installs the wheel and what it needs, nothing else.
RUN python -m venv /opt/memsaver \
 && /opt/memsaver/bin/pip install --no-cache-dir -c /tmp/constraints.txt "$TORCH" "$(ls /dist/*.whl)[engine,fleet]" \
 && /opt/memsaver/bin/pip uninstall -y pip

FROM python:${PYTHON}-slim-bookworm
LABEL org.opencontainers.image.title="memsaver" \
      org.opencontainers.image.description="Give a GPU back while the inference engine that fills it stays alive" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home memsaver
COPY --from=packages /opt/memsaver /opt/memsaver
ENV PATH=/opt/memsaver/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NCCL_GRAPH_REGISTER=0
USER 10001
WORKDIR /home/memsaver
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/livez', timeout=4)"]
# A container is reached from outside itself, so MEMSAVER_API_KEY must be set: without it the service refuses to start.
ENTRYPOINT ["memsaver", "serve"]
CMD ["--host", "0.0.0.0", "--port", "30000"]
