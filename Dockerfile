# Builds longspan's wheel and installs it: docker build -t longspan .
# A digest pins the base image: --build-arg BASE=python@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md ./
COPY src ./src
# setuptools comes first and builds without isolation, so that the constraints hold for it too.
RUN python -m venv /opt/longspan \
    && /opt/longspan/bin/pip install --no-cache-dir -c constraints.txt setuptools \
    && /opt/longspan/bin/pip wheel --no-deps --no-build-isolation -w /dist . \
    && /opt/longspan/bin/pip install --no-cache-dir -c constraints.txt /dist/*.whl

FROM ${BASE}
# Triton compiles the launchers of its kernels with a C compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home longspan \
    && install -d -o longspan -g longspan /shared
COPY --from=build /opt/longspan /opt/longspan
ENV PATH=/opt/longspan/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /shared
CMD ["longspan", "--help"]
