#!/bin/sh
# Builds tests/native/driver.cpp (ranks as threads) with AddressSanitizer and UndefinedBehaviorSanitizer, then with
# ThreadSanitizer, and runs it; compiles the sources for AArch64 where a cross compiler is installed, and runs them
# under qemu-aarch64 where that is. CXX chooses the compiler, ROUNDS the length.
set -eu
cd "$(dirname "$0")/../.."
src=commbench/native/src
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx=${CXX:-g++}
rounds=${ROUNDS:-100}
flags="-std=c++17 -g -Wall -Wextra -Werror -ffp-contract=off -pthread -I$src"
machine=$(uname -m)

build() {  # build NAME CXX FLAGS...
  name=$1 compiler=$2
  shift 2
  objects=""
  for unit in comm kernels_plain; do
    # shellcheck disable=SC2086
    "$compiler" $flags "$@" -c "$src/$unit.cpp" -o "$out/$name-$unit.o" &
    objects="$objects $out/$name-$unit.o"
  done
  if [ "$name" != aarch64 ] && [ "$machine" = x86_64 ]; then
    "$compiler" $flags "$@" -mavx2 -mf16c -c "$src/kernels_avx2.cpp" -o "$out/$name-avx2.o" &
    "$compiler" $flags "$@" -mavx2 -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-maybe-uninitialized \
      -Wno-uninitialized -c "$src/kernels_avx512.cpp" -o "$out/$name-avx512.o" &
    objects="$objects $out/$name-avx2.o $out/$name-avx512.o"
  fi
  "$compiler" $flags "$@" -c tests/native/driver.cpp -o "$out/$name-driver.o"
  wait
  # shellcheck disable=SC2086
  "$compiler" $flags "$@" "$out/$name-driver.o" $objects -o "$out/$name"
}

echo "== AddressSanitizer, UndefinedBehaviorSanitizer"
build asan "$cxx" -O1 -fsanitize=address,undefined -fno-sanitize-recover=all
"$out/asan" 1 "$rounds"

echo "== ThreadSanitizer"
build tsan "$cxx" -O1 -fsanitize=thread
TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" "$out/tsan" 2 "$rounds"

cross=aarch64-linux-gnu-g++
if [ "$machine" = aarch64 ]; then
  echo "== AArch64: this machine, done above"
elif command -v "$cross" >/dev/null 2>&1; then
  echo "== AArch64"
  build aarch64 "$cross" -O2 -static
  qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)
  if [ -n "$qemu" ]; then
    "$qemu" "$out/aarch64" 3 "$((rounds / 4))"
  else
    echo "compiled; not run: qemu-aarch64 is not installed"
  fi
else
  echo "== AArch64: skipped, $cross is not installed (Debian: g++-aarch64-linux-gnu)"
fi
echo "sanitizers: clean"
