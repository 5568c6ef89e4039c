#!/usr/bin/env bash
# Runs all tests of the workspace, documentation included, against real servers. Installs redis-server where it is
# missing. More arguments go to cargo: tests/run.sh -p lock-tests --test it fixture
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'tests/run.sh: %s\n' "$*" >&2
    exit 1
}

install_redis() {
    if ! command -v apt-get >/dev/null; then
        fail 'redis-server is missing, and this is no Debian that could install it.' \
            'Install Redis 7 or later (dnf install redis, pacman -S redis, apk add redis, brew install redis) and run this again.'
    fi
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        # -n: a script without a terminal must not wait for a password.
        if ! command -v sudo >/dev/null || ! { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
            fail 'redis-server is missing, and installing it needs root. As root: apt-get install redis-server'
        fi
        as_root=(sudo)
    fi
    echo 'tests/run.sh: redis-server is missing; installing it' >&2
    "${as_root[@]}" apt-get update -q
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server
    command -v redis-server >/dev/null || fail 'apt-get has installed redis-server, but it is not in the PATH'
}

command -v cargo >/dev/null || fail 'cargo is missing; install Rust from https://rustup.rs'
command -v redis-server >/dev/null || install_redis

if [ $# -eq 0 ]; then
    set -- --workspace
fi
exec cargo test --all-features --locked "$@"
