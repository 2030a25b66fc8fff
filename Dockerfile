# A CPU image, with a CPU build of torch, which is 3 GB smaller than one for CUDA:
#   docker build -t glowplug .
#   docker run --rm -p 30000:30000 -v /models:/models:ro glowplug serve --host 0.0.0.0 --model /models/x
# For a GPU start from an image that has torch for CUDA and Python 3.11 or 3.12; its torch is kept:
#   docker build --build-arg BASE=pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime -t glowplug .
# TORCH_INDEX is the index that torch comes from where the base has none; empty is pip's own, whose builds are for CUDA.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN python3 .ci/environment.py /opt/glowplug --torch-index "${TORCH_INDEX}" \
 && /opt/glowplug/bin/pip install --no-cache-dir -c /opt/glowplug/.constraints .

FROM ${BASE}
COPY --from=build /opt/glowplug /opt/glowplug
RUN useradd --create-home --uid 10001 glowplug
USER glowplug
WORKDIR /home/glowplug
ENV PATH=/opt/glowplug/bin:$PATH
EXPOSE 30000
# Ranks share anonymous memory (memfd), not files of /dev/shm. NCCL, with several GPUs, needs --shm-size=1g.
HEALTHCHECK --start-period=10m CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=5)"]
ENTRYPOINT ["glowplug"]
CMD ["serve", "--host", "0.0.0.0"]
