# syntax=docker/dockerfile:1
# memsaver in the official image of an engine, which starts as before:
#   docker build --target wheel -o dist .
#   docker build -f deploy/engine.Dockerfile --tag vllm-memsaver:0.1.0 .
#   docker build -f deploy/engine.Dockerfile --build-arg BASE=lmsysorg/sglang:v0.5.17 --tag sglang-memsaver:0.1.0 .
# The wheel is of Python 3.12, as the images are; for another Python give the first command --build-arg PYTHON=3.x.

ARG BASE=vllm/vllm-openai:v0.26.0
FROM ${BASE}
COPY dist /opt/memsaver/dist
COPY deploy/torch-memory-saver /opt/memsaver/torch-memory-saver
# The engine's packages stay as they are: if memsaver needs another version of one, the build ends with an error.
# An engine that imports torch_memory_saver gets the distribution that takes its place.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 \
 && python3 -m pip list --format=freeze > /opt/memsaver/installed.txt \
 && grep -E "^(torch|numpy|fastapi|starlette|uvicorn|pydantic|httpx|psutil)==" /opt/memsaver/installed.txt \
      > /opt/memsaver/engine.txt \
 && python3 -m pip install -c /opt/memsaver/engine.txt "$(ls /opt/memsaver/dist/memsaver-*.whl)[server]" \
 && if python3 -m pip show --quiet torch_memory_saver; then \
      python3 -m pip uninstall -y torch_memory_saver \
   && python3 -m pip install -c /opt/memsaver/engine.txt /opt/memsaver/torch-memory-saver; \
    fi
# vLLM sleeps by memsaver if it is started with --enable-sleep-mode. SGLang releases its graphs, too, if it is started
# with --enable-memory-saver.
ENV MEMSAVER_VLLM=1 \
    SGLANG_MEMORY_SAVER_CUDA_GRAPH=1
