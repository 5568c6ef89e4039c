//! The list of 100,000 locks among 1,000,000 foreign keys, and the delay that it causes to other
//! calls: an acquire or a release of another client every half millisecond.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;
use tokio::time::{interval, sleep};

use crate::{contest::ROUNDS, report::Row};

const LOCKS: usize = 100_000;
const FOREIGN: usize = 1_000_000;
const PACE: Duration = Duration::from_micros(500);

/// Creates the keys of locks as the client does, a thousand at a time.
const FILL: &str = "
for i = tonumber(ARGV[2]), tonumber(ARGV[3]) do
  if ARGV[1] == 'foreign' then
    redis.call('SET', 'session:' .. i, 'x')
  else
    local lock = 'lock:order:' .. i
    redis.call('SET', lock, string.sub(redis.sha1hex(i), 1, 32), 'PX', 3600000)
    redis.call('SET', '{' .. lock .. '}:f', '1795000000000000', 'EX', 86400)
  end
end";

pub(crate) async fn measure() -> Vec<Row> {
    let server = RedisServer::start().await;
    for (kind, count) in [("foreign", FOREIGN), ("lock", LOCKS)] {
        for from in (0..count).step_by(1000) {
            let [from, to] = [from, from + 999].map(|number| number.to_string());
            server.command(&["EVAL", FILL, "0", kind, &from, &to]).await;
        }
    }
    let connect = async || {
        let locks = LockClient::connect(&server.url()).await;
        locks.expect("our own server answers")
    };
    let (operator, service) = (connect().await, connect().await);
    let mut rounds = Vec::new();
    for round in 0..ROUNDS {
        eprintln!("list, round {} of {ROUNDS}", round + 1);
        let begun = Instant::now();
        let (listed, others) = beside(&service, list(&operator)).await;
        assert_eq!(listed, LOCKS, "some locks are missing");
        let took = begun.elapsed();
        let (_, alone) = beside(&service, sleep(took)).await;
        rounds.push((took, others, alone));
    }
    rounds.sort_by_key(|(took, ..)| *took);
    let (took, others, alone) = &rounds[ROUNDS / 2];
    let delays = |subject, taken: &Histogram<u64>| {
        let micros = |quantile| Some(taken.value_at_quantile(quantile) as f64 / 1e3);
        Row {
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            p999_us: micros(0.999),
            longest_us: micros(1.0),
            ..Row::new("list", subject, 1)
        }
    };
    vec![
        Row {
            ops_per_s: Some(LOCKS as f64 / took.as_secs_f64()),
            longest_us: Some(took.as_secs_f64() * 1e6),
            ..Row::new("list", "locks", 1)
        },
        delays("calls beside the list", others),
        delays("calls alone", alone),
    ]
}

async fn list(operator: &LockClient) -> usize {
    let mut list = operator.list("order:");
    let mut listed = 0;
    while let Some(lock) = list.next().await {
        lock.expect("the server answers");
        listed += 1;
    }
    listed
}

/// Runs `work` while another client acquires and releases a lock, and returns how long these calls
/// took.
async fn beside<T>(service: &LockClient, work: impl Future<Output = T>) -> (T, Histogram<u64>) {
    let mut taken = Histogram::new(3).expect("three digits are allowed");
    let calls = async {
        let mut ticks = interval(PACE);
        loop {
            ticks.tick().await;
            let begun = Instant::now();
            let guard = service.exclusive("beside").acquire().await;
            let acquired = begun.elapsed();
            let guard = guard.expect("the lock is free");
            ticks.tick().await;
            let begun = Instant::now();
            guard.release().await.expect("the lock is held");
            for took in [acquired, begun.elapsed()] {
                let nanos = took.as_nanos() as u64;
                taken.record(nanos).expect("the histogram grows");
            }
        }
    };
    let outcome = tokio::select! {
        outcome = work => outcome,
        () = calls => unreachable!("the calls do not end"),
    };
    (outcome, taken)
}
