# whet on an NVIDIA GPU. The host needs Docker, the NVIDIA Container Toolkit and a driver for the CUDA of torch's wheel
# (`whet doctor` says if it is too old).
#
#   docker build -t whet .
#   docker run --rm --gpus all whet doctor
#   docker run --rm -it --gpus all --shm-size 8g -v "$PWD:/work" -v whet-cache:/cache whet train my.yaml
#
# This image has a C compiler, which Triton needs; torch's wheel brings CUDA itself.
FROM python:3.12

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_NO_CACHE_DIR=1 \
    HF_HOME=/cache/huggingface \
    WHET_CACHE=/cache/whet

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src

# The versions that whet is tested with. torch comes first, as a layer of its own: it is large and changes rarely.
RUN python -m pip install -c constraints.txt torch
RUN python -m pip install -c constraints.txt '.[data,xlsx,export,search,track,eval,quantize]'
RUN whet --version && whet doctor

WORKDIR /work
ENTRYPOINT ["whet"]
CMD ["--help"]
