#!/usr/bin/env bash
# Runs all tests of the workspace, documentation included, against real servers. Where they are missing, it installs
# redis-server and unpacks Prometheus below the target directory. `--browser` also runs the tests of the pages for operators
# in Chromium, and installs it. `--stores` also runs the tests with PostgreSQL, etcd and ZooKeeper, and installs them. More
# arguments go to cargo, and select the tests:
# tests/run.sh -p lock-tests --test operators fixture
# `--judge` runs the storms alone, and lets two checkers of linearizability judge their histories: porcupine, for which it
# installs Go, and stateright. LOCK_TESTS_STORM=70 makes each storm ten minutes long.
# `--newest-etcd` runs the tests with etcd on the version in tests/etcd/go.mod, which it builds with the Go named there.
# `--fuzz 600 [WORD]` lets libFuzzer look for ten minutes for each target whose name contains the word, one for each core at a
# time. It prints their coverage, and fails if one breaks a promise; the input is then beside the corpus of the target.
# `--mutants DIRECTORY` plants mutants in a copy of the repository there, and prints those that no test notices; more
# arguments, such as `--file queue` or `--stage unit`, select some. The directory keeps the outcomes. `--stores` before it
# installs the servers of the tests.
set -euo pipefail
started=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'tests/run.sh: %s\n' "$*" >&2
    exit 1
}

# as_root WHAT COMMAND...: runs the command, which installs WHAT, as root.
as_root() {
    local what=$1
    shift
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    # -n: a script without a terminal must not wait for a password.
    elif command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
        sudo "$@"
    else
        fail "$what is missing, and installing it needs root. As root: apt-get install $what"
    fi
}

# on_debian WHAT: updates the list of packages.
on_debian() {
    if ! command -v apt-get >/dev/null; then
        fail "$1 is missing, and this is no Debian that could install it." \
            "Install it (dnf install $2, pacman -S $2, apk add $2, brew install $2) and run this again."
    fi
    echo "tests/run.sh: $1 is missing; installing it" >&2
    as_root "$1" apt-get update -q
}

install_redis() {
    on_debian redis-server redis
    as_root redis-server env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server
    command -v redis-server >/dev/null || fail 'apt-get has installed redis-server, but it is not in the PATH'
}

# Only unpacked: the package would start a service that listens on all addresses.
unpack_prometheus() {
    on_debian prometheus prometheus
    mkdir -p "$tools"
    (cd "$tools" && apt-get download -q prometheus && dpkg-deb -x prometheus_*.deb .)
    rm -f "$tools"/prometheus_*.deb
    command -v prometheus >/dev/null || fail 'the package prometheus contains no usr/bin/prometheus'
}

install_browser() {
    on_debian chromium chromium
    as_root chromium env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium chromium-driver
    command -v chromedriver >/dev/null || fail 'apt-get has installed chromium-driver, but chromedriver is not in the PATH'
}

# without_services PACKAGE...: installs them without the cluster and the services that they would create and start.
without_services() {
    as_root "$1" env DEBIAN_FRONTEND=noninteractive sh -ec '
        mkdir -p /etc/postgresql-common/createcluster.d
        no_cluster=/etc/postgresql-common/createcluster.d/lock-tests.conf
        policy=/usr/sbin/policy-rc.d
        [ ! -e $policy ] || policy=
        trap "rm -f $no_cluster $policy" EXIT
        echo "create_main_cluster = false" >$no_cluster
        [ -z "$policy" ] || { printf "#!/bin/sh\nexit 101\n" >$policy && chmod +x $policy; }
        apt-get install -y -q --no-install-recommends "$@"' without_services "$@"
}

install_postgresql() {
    on_debian postgresql postgresql-server
    without_services postgresql pgbouncer
    has_postgresql || fail 'apt-get has installed postgresql and pgbouncer, but they are not there'
}

install_etcd() {
    on_debian etcd-server etcd
    without_services etcd-server etcd-client
    has_etcd || fail 'apt-get has installed etcd-server and etcd-client, but they are not in the PATH'
}

has_etcd() {
    command -v etcd >/dev/null && command -v etcdctl >/dev/null
}

install_zookeeper() {
    on_debian zookeeper zookeeper
    without_services zookeeper default-jre-headless
    has_zookeeper || fail 'apt-get has installed zookeeper and default-jre-headless, but they are not there'
}

# In the places where the tests look for them.
has_zookeeper() {
    command -v java >/dev/null && [ -e /usr/share/java/zookeeper.jar ]
}

has_postgresql() {
    { command -v pgbouncer || [ -x /usr/sbin/pgbouncer ]; } >/dev/null || return 1
    command -v initdb >/dev/null || [ -x "$(pg_config --bindir 2>/dev/null)/initdb" ] || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/tools")
PATH=$PATH:$tools/usr/bin
command -v cargo >/dev/null || fail 'cargo is missing; install Rust from https://rustup.rs'
command -v redis-server >/dev/null || install_redis
command -v prometheus >/dev/null || unpack_prometheus

install_go() {
    on_debian golang-go go
    as_root golang-go env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends golang-go
    command -v go >/dev/null || fail 'apt-get has installed golang-go, but go is not in the PATH'
}

# judge ARGUMENT...: runs the storms, and judges their histories. That of the planted fault has to be rejected.
judge() {
    history=$tools/history
    rm -rf "$history"
    mkdir -p "$history"
    LOCK_TESTS_HISTORY=$history cargo test --workspace --all-features --locked --test topologies topologies::modes "$@"
    (cd tests/judge && go build -o "$tools/porcupine" .)
    local build=debug
    if [ -n "${LOCK_TESTS_STORM-}" ]; then
        build=release
        cargo build --release --locked -p lock-tests-model --bin judge
    else
        # The tests have built it, with these features.
        cargo build --workspace --all-features --locked --bin judge
    fi
    for judge in "$tools/porcupine" "${CARGO_TARGET_DIR:-target}/$build/judge"; do
        "$judge" "$history/planted.jsonl" && fail "$judge has not found the planted fault"
        find "$history" -name '*.jsonl' ! -name planted.jsonl -exec "$judge" {} +
    done
}

# fuzz SECONDS [WORD]
fuzz() {
    command -v c++ >/dev/null || { on_debian c++ gcc-c++ && as_root g++ apt-get install -y -q --no-install-recommends g++; }
    export seconds=$1 found=$tools/found
    # Those of `cargo bolero`, without a sanitizer, which needs another compiler than the stable one.
    flags='--cfg fuzzing --cfg fuzzing_libfuzzer -Cpasses=sancov-module'
    for flag in level=4 inline-8bit-counters pc-table trace-compares; do
        flags+=" -Cllvm-args=-sanitizer-coverage-$flag"
    done
    # With `--target`, build scripts and macros are built without the flags.
    built=$(RUSTFLAGS=$flags cargo test -p lock-runtime -p lock-tower --lib --all-features --locked --no-run --profile fuzz \
        --target "$(rustc -vV | sed -n 's/^host: //p')" --target-dir "${CARGO_TARGET_DIR:-target}/fuzz" --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    for binary in $built; do
        CARGO_BOLERO_SELECT=all "$binary" fuzz:: --nocapture --test-threads=1
    done | sed -n 's/.*"exe":"\([^"]*\)","work_dir":"\([^"]*\)".*"test_name":"\([^"]*'"${2-}"'[^"]*\)".*/\1 \2 \3/p' |
        xargs -P "$(nproc)" -L 1 bash -c 'fuzz_one "$@"' fuzz_one
}

# fuzz_one BINARY DIRECTORY NAME: what is found is kept for the next run.
fuzz_one() {
    mkdir -p "$found/$3" "$2/corpus" "$2/crashes"
    export BOLERO_LIBFUZZER_ARGS="$found/$3 $2/corpus -artifact_prefix=$2/crashes/ -max_total_time=$seconds -max_len=20000"
    local outcome=0
    "$1" "$3" --exact --nocapture --test-threads=1 >"$found/$3.log" 2>&1 || outcome=$?
    rmdir --ignore-fail-on-non-empty "$2/crashes"
    printf '%s %s\n' "$3" "$(grep -a '^#.*cov:' "$found/$3.log" | tail -1)"
    [ "$outcome" -eq 0 ] || tail -30 "$found/$3.log"
    return "$outcome"
}
export -f fuzz_one

with_browser=
with_stores=
with_judges=
while :; do
    case ${1-} in
    --browser)
        with_browser=1
        command -v chromium >/dev/null && command -v chromedriver >/dev/null || install_browser
        ;;
    --stores)
        with_stores=1
        has_postgresql || install_postgresql
        has_etcd || install_etcd
        has_zookeeper || install_zookeeper
        ;;
    --judge)
        with_judges=1
        has_postgresql || install_postgresql
        command -v go >/dev/null || install_go
        ;;
    --newest-etcd)
        has_etcd || install_etcd
        command -v go >/dev/null || fail "go is missing: see https://go.dev/dl"
        needed=$(sed -n 's/^go //p' tests/etcd/go.mod)
        found=$(go env GOVERSION)
        [ "$(printf '%s\n' "$needed" "${found#go}" | sort -V | head -1)" = "$needed" ] ||
            fail "the newest etcd needs Go $needed, and $found is installed: see https://go.dev/dl"
        newest=$tools/newest-etcd
        mkdir -p "$newest"
        (cd tests/etcd && go build -o "$newest/etcd" .)
        shift
        PATH=$newest:$PATH exec cargo test --workspace --all-features --locked --test stores etcd "$@"
        ;;
    --fuzz)
        shift
        fuzz "${1-60}" "${2-}"
        exit
        ;;
    --mutants)
        shift
        [ $# -gt 0 ] || fail '--mutants needs a directory'
        directory=$(cd "$started" && realpath -m -- "$1")
        shift
        exec cargo run -p lock-tests-mutants --locked -- "$directory" "$@"
        ;;
    *) break ;;
    esac
    shift
done
if [ -n "$with_judges" ]; then
    judge "$@"
    exit
fi
if [ $# -eq 0 ]; then
    # The tests of lockctl build it as these are built.
    export LOCK_TESTS_EXCLUDED=' --exclude lock-tests-mutants'
    [ -n "$with_browser" ] || LOCK_TESTS_EXCLUDED+=' --exclude lock-tests-browser'
    [ -n "$with_stores" ] || LOCK_TESTS_EXCLUDED+=' --exclude lock-tests-sqlx'
    # shellcheck disable=SC2086
    set -- --workspace $LOCK_TESTS_EXCLUDED
    [ -n "$with_stores" ] || set -- "$@" -- --skip postgres --skip etcd --skip zookeeper --skip stores:: --skip outage::database::
fi
# Tests wait most of the time: with two threads for each core, one core of two is idle. Each may start servers.
cores=$(nproc)
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores < 8 ? cores * 3 : 24))}
exec cargo test --all-features --locked "$@"
