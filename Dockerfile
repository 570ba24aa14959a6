# Without a GPU:  docker build -t recsys-basis .
# With one:       docker build -t recsys-basis --build-arg ACCELERATOR=cuda .      and run with --gpus all
# Jobs read and write the mounted folder, as you:
#                 docker run --rm --user "$(id -u)" -v "$PWD:/data" recsys-basis doctor
FROM python:3.11-slim

ARG ACCELERATOR=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    LOGNAME=user \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/recsys_basis

# The locks name every package, so pip resolves nothing; only the CPU build of torch is not on PyPI.
COPY requirements requirements
RUN case "$ACCELERATOR" in \
      cpu) pip install --no-deps --extra-index-url "$TORCH_INDEX" "$(grep '^torch==' requirements/cpu.lock)" ;; \
      cuda) ;; \
      *) echo "ACCELERATOR=$ACCELERATOR: must be cpu or cuda" >&2; exit 1 ;; \
    esac \
    && pip install --no-deps -r "requirements/$ACCELERATOR.lock"

COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY configs configs
COPY recsys_basis recsys_basis
# The constraint holds the build tools to their locked versions too. The compiler leaves once the kernels are made;
# libgomp runs their threads.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 \
    && PIP_CONSTRAINT=requirements/dev.lock pip install --no-deps . \
    && apt-get purge --yes --auto-remove g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home user && mkdir /data && chown user /data
USER user
WORKDIR /data

ENTRYPOINT ["recsys-basis"]
CMD ["--help"]
