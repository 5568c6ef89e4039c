//! What an operator sees of four servers of `flash-sale`: the holders of the lock, metrics in
//! Prometheus, log lines and readiness, while all is well, after a revocation and in an outage.

#![expect(
    clippy::unwrap_used,
    reason = "as in the other tests, whose helpers are not in test functions either"
)]

use std::{fs, net::SocketAddr, path::Path, process::Command, time::Duration};

use futures_util::{StreamExt as _, future::join_all};
use lock_runtime::{LockClient, operator::Revocation};
use lock_tests::{Prometheus, RedisServer, Supervised};
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(30);
const KEY: &str = "stock:sneaker";

/// A sale that lasts longer than the test.
struct Sale {
    process: Supervised,
    namespace: String,
    servers: Vec<SocketAddr>,
}

impl Sale {
    async fn begin(url: &str) -> Self {
        let directory = tempfile::tempdir().unwrap().keep();
        let redis = format!("--redis={url}");
        let options = ["--requests=3000000", "--stock=3000000", "--concurrency=40"];
        // Spans, and the events within them that are of interest.
        let levels = "RUST_LOG=info,lock_runtime::observe::watch=debug";
        let sale = env!("CARGO_BIN_EXE_flash-sale");
        let command = ["env", levels, sale, "--processes=4", &redis];
        let command = command.into_iter().chain(options);
        let process = Supervised::spawn(&directory, command).unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            let output = process.output();
            let after = |word: &str| {
                let lines = output
                    .lines()
                    .filter_map(move |line| line.strip_prefix(word));
                lines.map(str::to_owned).collect::<Vec<_>>()
            };
            let servers: Vec<_> = after("Server: http://")
                .iter()
                .filter_map(|rest| rest.split('/').next()?.parse().ok())
                .collect();
            if let (Some(namespace), 4) = (after("Locks: ").pop(), servers.len()) {
                return Self {
                    process,
                    namespace,
                    servers,
                };
            }
            assert!(Instant::now() < until, "{output}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// The statuses of the readiness probes.
    async fn readiness(&self) -> Vec<u16> {
        let get = async |address: &SocketAddr| {
            let response = reqwest::get(format!("http://{address}/ready"))
                .await
                .unwrap();
            response.status().as_u16()
        };
        join_all(self.servers.iter().map(get)).await
    }

    async fn is_ready(&self, expected: u16) {
        let since = Instant::now();
        while self.readiness().await != [expected; 4] {
            assert!(since.elapsed() < PATIENCE, "{}", self.process.output());
            sleep(Duration::from_millis(50)).await;
        }
        println!("{expected} after {:?}", since.elapsed());
    }

    /// The log lines with this text.
    fn lines(&self, text: &str) -> Vec<String> {
        let output = self.process.output();
        let lines = output.lines().filter(|line| line.contains(text));
        lines.map(str::to_owned).collect()
    }
}

/// The expressions of the dashboard, with values for the variables of Grafana.
fn dashboard() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/prometheus/dashboard.json");
    let board: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let panels = board["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array());
    let targets = targets.flatten().map(|target| target["expr"].as_str());
    let values = |text: &str| {
        text.replace("$name", ".*")
            .replace("$__rate_interval", "1m")
    };
    targets.map(|text| values(text.unwrap())).collect()
}

#[test]
fn alerts_fire_when_they_should() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/prometheus");
    let output = Command::new("promtool")
        .args(["test", "rules", "alerts.test.yml"])
        .current_dir(directory)
        .output()
        .expect("promtool, which tests/run.sh gets");
    assert!(output.status.success(), "{output:?}");
}

#[tokio::test]
async fn an_operator_sees_holders_revocations_and_outages() {
    let redis = RedisServer::start().await;
    let sale = Sale::begin(&redis.url()).await;
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/prometheus/alerts.yml");
    let prometheus = Prometheus::start(&sale.servers, &rules.canonicalize().unwrap()).await;
    prometheus.becomes("sum(up{job='locks'}) == 4").await;
    let sells = "count(rate(lock_acquisitions_total{name='flash_sale::shop::sell', outcome='granted'}[5s]) > 0) == 4";
    prometheus.becomes(sells).await;
    sale.is_ready(200).await;

    // The holder and the waiters, by name.
    let operator = LockClient::builder().namespace(&sale.namespace);
    let operator = operator.connect(&redis.url()).await.unwrap();
    let (mut holders, mut waiters) = (0, 0);
    let until = Instant::now() + PATIENCE;
    while holders < 3 || waiters < 3 {
        assert!(Instant::now() < until, "{holders} {waiters}");
        let listed: Vec<_> = operator.list("stock:").collect().await;
        for lock in listed {
            let lock = lock.unwrap();
            assert_eq!(lock.key.as_str(), KEY);
            let is_named =
                |name: Option<&str>| name.is_some_and(|it| it.starts_with("flash-sale@"));
            let named = |all: usize, named: usize| usize::from(all > 0 && all == named);
            let state = &lock.state;
            let known = state.holders.iter().filter(|it| is_named(it.client.name()));
            holders += named(state.holders.len(), known.count());
            let known = state.waiters.iter().filter(|it| is_named(it.client.name()));
            waiters += named(state.waiters.len(), known.count());
            println!("{} {:?}", lock.key, state);
        }
    }

    // A revocation is seen in metrics, logs and traces. A sale may be over before it learns of it,
    // or lose its lock before it begins.
    let lost = "sum by (name) (lock_lost_total{loss='revoked'}) > 0";
    let hold = || {
        let lines = sale.lines(": lost name=");
        lines.into_iter().find(|line| line.contains("lock.hold{"))
    };
    while prometheus.query(lost).await.is_empty() || hold().is_none() {
        assert!(Instant::now() < until, "{}", sale.process.output());
        for holder in operator.inspect(KEY).await.unwrap().holders {
            let revoked = operator.revoke(KEY).holder(holder.id).await;
            if revoked.unwrap() == Revocation::Revoked {
                println!("revoked {}", holder.client);
            }
        }
    }
    let line = hold().expect("a log line");
    assert!(line.contains("flash_sale::shop::sell"), "{line}");

    for expression in dashboard() {
        let seen = prometheus.query(&expression).await;
        println!("{expression}: {}", seen.len());
        // All customers want the same lock, so no calls for several of them are grouped.
        let is_of_groups = expression.contains("lock_store_group_size");
        assert!(is_of_groups || !seen.is_empty(), "{expression}");
    }
    let failed = "prometheus_rule_evaluation_failures_total > 0";
    assert!(prometheus.query(failed).await.is_empty());
    let alerts = prometheus.query("ALERTS{severity='critical'}").await;
    assert!(alerts.is_empty(), "{alerts:?}");

    redis.kill();
    sale.is_ready(503).await;
    let refused = "count(rate(lock_acquisitions_total{outcome='unavailable'}[2s]) > 0) == 4";
    prometheus.becomes(refused).await;
    prometheus
        .becomes("ALERTS{alertname='LockStoreUnavailable', alertstate='pending'}")
        .await;
    redis.restart_empty().await;
    sale.is_ready(200).await;
    prometheus.becomes(sells).await;
    for text in ["connection lost", "connection restored"] {
        let lines = sale.lines(text).len();
        assert!((4..20).contains(&lines), "{text}: {lines}");
    }
    println!("{}", sale.process.output());
}
