# The engine for Atlas A3 (Ascend 910C). From the root of the checkout, with BuildKit (Docker 23 or later):
#
#   docker build -f configs/cluster/ascend.Dockerfile -t lopa:ascend .
#   docker run --runtime=ascend -e ASCEND_VISIBLE_DEVICES=0-15 --net=host --shm-size=16g -v lopa-cache:/cache \
#     -v /etc/hccn.conf:/etc/hccn.conf:ro -v "$PWD/checkpoints":/models:ro lopa:ascend \
#     scripts/serve.sh ascend_910c_tp4_bp4 /models/NAME --host 0.0.0.0
#
# --runtime=ascend is Ascend Docker Runtime, which mounts driver and devices; without it docs/ascend.md has the options.
# Weights are mounted at /models. /cache keeps what is compiled. Only CANN and torch-npu make it large.
ARG BASE=quay.io/ascend/cann:9.1.0-a3-ubuntu22.04-py3.12
# hadolint ignore=DL3006
FROM ${BASE}

# The base image may end as another user.
# hadolint ignore=DL3002
USER 0

# g++: the compiled graph modes build host code. hadolint asks for versions, which a moving base does not keep.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libjemalloc2 tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --home-dir /cache --create-home lopa \
 && chown 10001:1000 /cache

# The CPU build of torch: torch-npu ends the process in a CUDA build. Offline: the same wheels from a folder, by
# --no-index --find-links, and --no-build-isolation for the last line.
ARG CPU_BUILDS=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.10.0 --index-url "${CPU_BUILDS}"
RUN --mount=type=bind,target=/src,rw \
    pip install --no-cache-dir '/src[ascend,server]' torch-npu==2.10.0.post4 --extra-index-url "${CPU_BUILDS}"
COPY scripts /opt/lopa/scripts

ENV HOME=/cache PYTHON=python3
WORKDIR /opt/lopa
VOLUME /cache
EXPOSE 8000
# Group 1000 is HwHiAiUser on hosts with Huawei's driver: /dev/davinci* belong to it.
USER 10001:1000
HEALTHCHECK --start-period=20m --interval=15s --timeout=5s \
  CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# env.sh: CANN's and nnal's set_env.sh, and jemalloc, which no login shell brings here.
ENTRYPOINT ["tini", "--", "bash", "-c", "source /opt/lopa/scripts/env.sh && exec \"$@\"", "lopa"]
CMD ["lopa", "serve", "demo", "--host", "0.0.0.0"]
