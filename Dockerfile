# packprep with its kernels compiled:
#   docker build -t packprep . && docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/data" packprep build recipe.toml --out packed
FROM python:3.12-slim
# Kernels: root writes them, everybody reads them. What another processor needs besides goes to the home, which everybody has.
ENV NUMBA_CACHE_DIR=/var/cache/kernels HOME=/tmp
WORKDIR /packprep
COPY . .
RUN pip install --no-cache-dir --root-user-action=ignore .
RUN packprep warm && chmod -R a+rX "$NUMBA_CACHE_DIR"
USER 1000:1000
WORKDIR /data
ENTRYPOINT ["packprep"]
