# syntax=docker/dockerfile:1
# memsaver in the official image of an engine, which starts as before:
#   docker build --target wheel -o dist .
#   docker build -f deploy/engine.Dockerfile --target vllm --tag vllm-memsaver:0.1.0 .
#   docker build -f deploy/engine.Dockerfile --target sglang --build-arg BASE=lmsysorg/sglang:v0.5.17 \
#     --tag sglang-memsaver:0.1.0 .
# The wheel is of Python 3.12, as the images are; for another Python give the first command --build-arg PYTHON=3.x.

ARG BASE=vllm/vllm-openai:v0.26.0
FROM ${BASE} AS engine
COPY dist /opt/memsaver/dist
# The engine's packages stay as they are: if memsaver needs another version of one, the build ends with an error.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 \
 && python3 -m pip list --format=freeze > /opt/memsaver/installed.txt \
 && grep -E "^(torch|numpy|fastapi|starlette|uvicorn|pydantic|httpx|psutil)==" /opt/memsaver/installed.txt \
      > /opt/memsaver/engine.txt \
 && python3 -m pip install -c /opt/memsaver/engine.txt "$(ls /opt/memsaver/dist/memsaver-*.whl)[server]"

# SGLang uses memsaver in place of torch_memory_saver, which stays installed, if it is started with
# --enable-memory-saver. It releases its graphs, too.
FROM engine AS sglang
RUN python3 -m pip show --quiet sglang
ENV MEMSAVER_SGLANG=1 \
    SGLANG_MEMORY_SAVER_CUDA_GRAPH=1

# vLLM sleeps by memsaver if it is started with --enable-sleep-mode.
FROM engine AS vllm
RUN python3 -m pip show --quiet vllm
ENV MEMSAVER_VLLM=1
