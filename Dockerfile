# The GPU environment of `make install` in an image: the same lock, the same script.
#
#   docker build -t slime .
#   docker run --gpus all --ipc=host --ulimit nofile=65536 --network host -v /models:/models -it slime
#
# devel, for the compilers of CUDA: engines compile some of their kernels when they start.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates git iproute2 libibverbs1 libnuma1 make openssh-client procps \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slime

# Before the code, so that a change of code does not install again; README, licence and the two files of slime are for the
# command `slime`.
COPY Makefile pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts/install.sh scripts/device.sh scripts/
COPY slime/__init__.py slime/__main__.py slime/
# One more index to look for torch in, for builds for CUDA.
ARG SLIME_TORCH_INDEX=""
RUN DEVICE=gpu PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 make install

COPY . .
ENV PATH=/opt/slime/.venv/bin:${PATH} \
    PYTHONPATH=/opt/slime
CMD ["bash"]
