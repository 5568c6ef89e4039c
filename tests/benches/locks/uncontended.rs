//! Acquire and release, every task its own key, over one connection; the limit is the same two scripts sent raw.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use lock_runtime::{LockClient, LockKey, store::Token};
use lock_tests::redis_server::RedisServer;
use redis::{
    Value,
    aio::{ConnectionManager, ConnectionManagerConfig},
};

use crate::{
    ROUNDS,
    report::{Report, Round, latencies},
};

const TASKS: [usize; 3] = [1, 64, 1024];

pub(crate) async fn measure(report: &mut Report, slice: Duration) {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.expect("our own server answers");
    let raw = Raw::connect(&server.url()).await;
    for tasks in TASKS {
        let mut ours = Vec::new();
        let mut limit = Vec::new();
        for round in 0..=ROUNDS {
            eprintln!("uncontended, {tasks} tasks, round {round} of {ROUNDS}");
            let one_of_ours = run(tasks, |task| {
                let locks = locks.clone();
                let key = LockKey::new(format!("bench:{task}")).expect("a short name is valid");
                async move {
                    let mut laps = Laps::start(slice);
                    while laps.go_on() {
                        let guard = locks.exclusive(&key).acquire().await.expect("nobody else wants this key");
                        guard.release().await.expect("it is held");
                    }
                    laps
                }
            });
            let one_of_ours = one_of_ours.await;
            let one_of_limit = run(tasks, |task| {
                let raw = raw.clone();
                let names = [format!("lock:raw:{task}"), format!("{{lock:raw:{task}}}:f")];
                async move {
                    let mut laps = Laps::start(slice);
                    while laps.go_on() {
                        raw.acquire_and_release(&names).await;
                    }
                    laps
                }
            });
            let one_of_limit = one_of_limit.await;
            // The first round warms both up.
            if round > 0 {
                ours.push(one_of_ours);
                limit.push(one_of_limit);
            }
        }
        report.compare("uncontended", tasks, &ours, Some(("limit", &limit)));
    }
    locks.shutdown().await;
}

/// Runs `tasks` of a subject at a time.
async fn run<F: Future<Output = Laps> + Send + 'static>(tasks: usize, subject: impl Fn(usize) -> F) -> Round {
    let start = Instant::now();
    let tasks: Vec<_> = (0..tasks).map(|task| tokio::spawn(subject(task))).collect();
    let mut all = latencies();
    for task in tasks {
        let laps = task.await.expect("a subject does not panic");
        all.add(laps.latencies).expect("all histograms have the same bounds");
    }
    Round::new(start.elapsed(), &all)
}

/// Times the turns of a loop.
struct Laps {
    until: Instant,
    before: Option<Instant>,
    latencies: Histogram<u64>,
}

impl Laps {
    fn start(slice: Duration) -> Self {
        Self { until: Instant::now() + slice, before: None, latencies: latencies() }
    }

    /// Records the turn that ended, and says whether there is time for another one.
    fn go_on(&mut self) -> bool {
        let now = Instant::now();
        if let Some(before) = self.before.replace(now) {
            self.latencies.record((now - before).as_nanos() as u64).expect("the histogram grows");
        }
        now < self.until
    }
}

/// The store's own scripts, sent by hand through a connection with the store's own settings.
#[derive(Clone)]
struct Raw {
    connection: ConnectionManager,
    acquire: String,
    release: String,
}

macro_rules! script {
    ($($part:literal)+) => {
        concat!($(include_str!(concat!("../../../lock-runtime/src/store/redis/lua/", $part, ".lua"))),+)
    };
}

impl Raw {
    async fn connect(url: &str) -> Self {
        let client = redis::Client::open(format!("{url}?protocol=resp3")).expect("the fixture's URL is valid");
        let info = client.get_connection_info().clone();
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = redis::Client::open(info.set_tcp_settings(tcp)).expect("the fixture's URL is valid");
        let config = ConnectionManagerConfig::new().set_response_timeout(None).set_pipeline_buffer_size(4096);
        let mut connection = ConnectionManager::new_with_config(client, config).await.expect("our own server answers");
        let mut load = async |text: &str| {
            redis::cmd("SCRIPT").arg("LOAD").arg(text).query_async(&mut connection).await.expect("the script is valid")
        };
        let acquire = load(script!("clock" "fence" "holders" "standing" "acquire")).await;
        let release = load(script!("release")).await;
        Self { connection, acquire, release }
    }

    async fn acquire_and_release(&self, names: &[String; 2]) {
        let mut connection = self.connection.clone();
        let token = Token::random().to_hex();
        let granted: Value = redis::cmd("EVALSHA")
            .arg(&self.acquire)
            .arg(2)
            .arg(names)
            .arg("9000000000000000")
            .arg("exclusive")
            .arg(&token)
            .arg("30000")
            .query_async(&mut connection)
            .await
            .expect("the script runs");
        expect_word(&granted, "granted");
        let released: Value = redis::cmd("EVALSHA")
            .arg(&self.release)
            .arg(1)
            .arg(&names[0])
            .arg(&token)
            .arg("0")
            .query_async(&mut connection)
            .await
            .expect("the script runs");
        expect_word(&released, "released");
    }
}

fn expect_word(reply: &Value, word: &str) {
    let Value::Array(items) = reply else { panic!("{reply:?}") };
    assert!(matches!(items.first(), Some(Value::BulkString(first)) if first == word.as_bytes()), "{reply:?}");
}
