# The engine for NVIDIA GPUs. From the root of the checkout, with BuildKit (Docker 23 or later):
#
#   docker build -f configs/cluster/cuda.Dockerfile -t lopa:cuda .
#   docker run --gpus all --shm-size=1g -p 8000:8000 -v lopa-cache:/cache -v "$PWD/checkpoints":/models:ro lopa:cuda \
#     lopa serve /models/NAME --host 0.0.0.0
#
# torch's wheels bring CUDA, nvidia-container-toolkit the driver. Weights are mounted at /models. /cache keeps what is
# compiled (kernels, the scheduler's loops) and measured (tiles): without it each start compiles for a minute or more.
FROM python:3.12-slim

# gcc and libc6-dev: Triton compiles a launcher for each kernel when it is first used. tini: the end of children.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --home-dir /cache --create-home lopa

RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir '/src[cuda,server]'
COPY scripts /opt/lopa/scripts

ENV HOME=/cache PYTHON=/usr/local/bin/python
WORKDIR /opt/lopa
VOLUME /cache
EXPOSE 8000
# A number: Kubernetes' runAsNonRoot does not look names up.
USER 10001:10001
HEALTHCHECK --start-period=15m --interval=15s --timeout=5s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tini", "--"]
CMD ["lopa", "serve", "demo", "--host", "0.0.0.0"]
