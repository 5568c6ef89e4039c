//! URLs of every kind, right and wrong: no error and no `Debug` output contains a password, and no
//! URL makes the client panic.
//!
//! `LOCK_TESTS_STORM=400 cargo test -p lock-tests --all-features --test api urls` takes ten
//! minutes. `LOCK_TESTS_SEED=n` begins with another URL.

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    str::FromStr,
    time::Duration,
};

use lock_runtime::{LockClient, LockError};
use lock_tests::chain;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};
use tokio::{runtime::Builder, time::Instant};

const USUAL: Duration = Duration::from_millis(1500);
/// The URLs of one runtime, whose tasks end with it.
const BATCH: u64 = 500;

/// The parts of passwords. Nothing else in a URL contains them.
const SECRETS: [&str; 3] = ["zq7kx", "wvjtb", "Q9_Z"];
const SCHEMES: [&str; 16] = [
    "redis",
    "rediss",
    "valkey",
    "valkeys",
    "REDIS",
    "redis+sentinel",
    "rediss+sentinel",
    "valkey+sentinel",
    "redis+cluster",
    "rediss+cluster",
    "redis+unix",
    "unix",
    "postgres",
    "postgresql",
    "http",
    "memory",
];
const SEPARATORS: [&str; 16] = [
    "@", ":", "/", "?", "#", "&", "=", "%", ",", "[", "]", "%40", "://", " ", "\\", "é",
];
const HOSTS: [&str; 9] = [
    "127.0.0.1",
    "localhost:6379",
    "db.example:5432",
    "[::1]:7",
    "a:1,b:2,c:3",
    "",
    "host:port",
    "a,b",
    "%2Frun%2Fsocket",
];
const PATHS: [&str; 9] = [
    "",
    "/",
    "/0",
    "/shop",
    "/mymaster/0",
    "/run/redis.sock",
    "/mymaster",
    "/a/b",
    "#part",
];
const PARAMETERS: [&str; 10] = [
    "",
    "?",
    "?db=1",
    "?sslmode=require",
    "?sslmode=prefer&connect_timeout=3",
    "?protocol=resp3",
    "?replica_timeout=3",
    "?schema_owner=app",
    "?host=other&port=1",
    "?application_name=a@b",
];

fn variable<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

fn pick<'a>(random: &mut StdRng, choices: &[&'a str]) -> &'a str {
    choices.choose(random).unwrap()
}

fn password(random: &mut StdRng) -> String {
    let mut password = pick(random, &SECRETS).to_owned();
    for _ in 0..random.random_range(0..3) {
        password += pick(random, &SEPARATORS);
        password += pick(random, &SECRETS);
    }
    password
}

fn url(random: &mut StdRng) -> String {
    let (scheme, host) = (pick(random, &SCHEMES), pick(random, &HOSTS));
    let (path, parameters) = (pick(random, &PATHS), pick(random, &PARAMETERS));
    let (user, password) = (pick(random, &["", "app", "us%40er"]), password(random));
    match random.random_range(0..12) {
        0 => {
            let name = pick(random, &["password", "pass"]);
            format!("{scheme}://{host}{path}?user={user}&{name}={password}")
        }
        1 => format!("{scheme}://{user}@{host}{path}?password={password}&db=1"),
        2 => format!("{scheme}://{scheme}://{user}:{password}@{host}{path}"),
        3 => format!("{scheme}:///{user}:{password}@{host}{path}"),
        4 => {
            let one = format!("{scheme}://{user}:{password}@{host}{path}");
            format!("redlock:{one},redis://b:1,{one}")
        }
        5 => format!("{user}:{password}@{host}{path}{parameters}"),
        6 => format!("{scheme}:{user}:{password}@{host}{path}{parameters}"),
        _ => format!("{scheme}://{user}:{password}@{host}{path}{parameters}"),
    }
}

/// Damages the URL, but neither a part of its password nor the characters around it.
fn damaged(random: &mut StdRng, url: &str) -> String {
    let mut places: Vec<_> = url.char_indices().map(|(at, _)| at).collect();
    places.push(url.len());
    let is_outside = |at: &usize| {
        let within = |(begin, part): (usize, &str)| begin < *at && *at < begin + part.len();
        !SECRETS
            .iter()
            .any(|secret| url.match_indices(secret).any(within))
    };
    places.retain(is_outside);
    let (before, after) = url.split_at(*places.choose(random).unwrap());
    let inserted = match random.random_range(0..4) {
        0 => "",
        _ => pick(random, &SEPARATORS),
    };
    let after = match after.chars().next() {
        Some(first) if random.random() && first.is_alphanumeric() => {
            let is_secret = SECRETS.iter().any(|secret| after.starts_with(secret));
            &after[if is_secret { 0 } else { first.len_utf8() }..]
        }
        _ => after,
    };
    format!("{before}{inserted}{after}")
}

/// All that a caller may print.
fn shown(client: &Result<LockClient, LockError>) -> String {
    match client {
        Ok(client) => format!("{client:?}"),
        Err(error) => format!("{error} {error:?} {error:#} {}", chain(error)),
    }
}

#[test]
fn no_url_shows_its_password_or_makes_a_client_panic() {
    let until = Instant::now() + USUAL * variable("LOCK_TESTS_STORM").unwrap_or(1);
    let first: u64 = variable("LOCK_TESTS_SEED").unwrap_or(0);
    let (mut seed, mut accepted) = (first, 0);
    while Instant::now() < until {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for seed in seed..seed + BATCH {
                let mut random = StdRng::seed_from_u64(seed);
                let mut url = url(&mut random);
                if random.random() {
                    url = damaged(&mut random, &url);
                }
                let client = catch_unwind(AssertUnwindSafe(|| LockClient::connect_lazy(&url)));
                let client = client.unwrap_or_else(|_| panic!("LOCK_TESTS_SEED={seed}: {url}"));
                accepted += u64::from(client.is_ok());
                let shown = shown(&client);
                for secret in SECRETS {
                    let seed = format!("LOCK_TESTS_SEED={seed}");
                    assert!(!shown.contains(secret), "{seed}: {url}: {shown}");
                }
            }
        });
        seed += BATCH;
    }
    println!("{accepted} of {} URLs were accepted", seed - first);
    assert!(accepted > 20, "{accepted}");
}
