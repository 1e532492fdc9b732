#!/usr/bin/env bash
# Write the generated code and stubs of every .proto: `make gen`. With a folder as argument they go there instead,
# which is how CI compares them with what is committed.
# docs/decisions/0019-generated-code-is-checked-in.md
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-src}
venv=../../.venv-gen
if ! cmp -s requirements-gen.txt "$venv/installed.txt"; then
  ../../.venv/bin/python -m venv --clear "$venv"
  "$venv/bin/pip" install -qq -r requirements-gen.txt
  cp requirements-gen.txt "$venv/installed.txt"
fi
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I proto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  proto/shoal_contracts/v1/*.proto
# Every file gets a gRPC module, also where there is no service to put into it.
for proto in proto/shoal_contracts/v1/*.proto; do
  grep -q '^service ' "$proto" || rm -f "$out/shoal_contracts/v1/$(basename "$proto" .proto)"_pb2_grpc.py*
done
