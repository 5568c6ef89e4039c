//! The user guide.
//!
//! | Page | Contents |
//! |---|---|
//! | [`functions`] | Locking a function: each argument of `#[distributed_lock]`, with an example |
//! | [`modes`] | Kinds of locks: exclusive, read/write, permits, several keys, re-entrant |
//! | [`waiting`] | The wait queue: order, hand-off, latency, dead waiters |
//! | [`retaining`] | Acquiring a lock again without a call to the store |
//! | [`holding`] | Holding a lock: lease, loss, fencing tokens, shutdown |
//! | [`once`] | Work that is done once for a key, and its result |
//! | [`limits`] | The limits of a lease lock, and the remedies |
//! | [`fencing`] | How to make it safe: fencing tokens in PostgreSQL, other databases and Redis |
//! | [`redis`] | Redis as the store: URLs, Sentinel, clusters, TLS, data layout, settings |
//! | [`postgres`] | PostgreSQL as the store: schema, rights, poolers, standbys |
//! | [`etcd`] | etcd as the store: rights, time, what operators should know |
//! | [`zookeeper`] | ZooKeeper as the store: rights, time, what operators should know |
//! | [`stores`] | Locks in a database of your own |
//! | [`majority`] | Several independent servers and a majority vote (Redlock) |
//! | [`observing`] | Names, metrics and spans; Prometheus and OpenTelemetry |
//! | [`lockctl`] | Locks on the command line, and commands under a lock |
//! | [`recipes`] | Scheduled jobs, tests, blocking code, a lock shared by two services |
//! | [`migration`] | Moving from Redisson, ShedLock or redsync |
//!
//! The page for operators, with who holds which lock and who waits, is `lock_tower::inspector`.
//! Recipes for axum and tonic (keys from a body, a cookie or a user, and graceful shutdown) are on
//! the page `lock_tower::recipes`.

#[cfg(feature = "etcd")]
pub mod etcd {
    #![doc = include_str!("../guide/etcd.md")]
}

pub mod fencing {
    #![doc = include_str!("../guide/fencing.md")]
    #![cfg_attr(feature = "postgres", doc = "```no_run")]
    #![cfg_attr(not(feature = "postgres"), doc = "```ignore")]
    #![doc = include_str!("../guide/fencing/postgres.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/fencing/libraries.md")]
    #![doc = "```text"]
    #![doc = include_str!("../guide/fencing/sqlx.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/fencing/promise.md")]
}

#[cfg(feature = "macros")]
pub mod functions {
    #![doc = include_str!("../guide/functions.md")]
}

pub mod holding {
    #![doc = include_str!("../guide/holding.md")]
}

pub mod limits {
    #![doc = include_str!("../guide/limits.md")]
}

pub mod lockctl {
    #![doc = include_str!("../guide/lockctl.md")]
}

pub mod majority {
    #![doc = include_str!("../guide/majority.md")]
}

pub mod migration {
    #![doc = include_str!("../guide/migration.md")]
}

pub mod modes {
    #![doc = include_str!("../guide/modes.md")]
}

pub mod observing {
    #![doc = include_str!("../guide/observing.md")]
    #![cfg_attr(feature = "metrics", doc = "```")]
    #![cfg_attr(not(feature = "metrics"), doc = "```ignore")]
    #![doc = include_str!("../guide/observing/prometheus.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/observing/metrics.md")]
    #![cfg_attr(feature = "tracing", doc = "```")]
    #![cfg_attr(not(feature = "tracing"), doc = "```ignore")]
    #![doc = include_str!("../guide/observing/opentelemetry.rs")]
    #![doc = "```"]
}

pub mod once {
    #![doc = include_str!("../guide/once.md")]
}

#[cfg(feature = "postgres")]
pub mod postgres {
    #![doc = include_str!("../guide/postgres.md")]
}

pub mod recipes {
    #![doc = include_str!("../guide/recipes.md")]
    #![cfg_attr(feature = "macros", doc = "```")]
    #![cfg_attr(not(feature = "macros"), doc = "```ignore")]
    #![doc = include_str!("../guide/recipes/scheduled.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/recipes/schedulers.md")]
    #![doc = "```text"]
    #![doc = include_str!("../guide/recipes/tokio_cron_scheduler.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/recipes/apalis.md")]
    #![doc = "```text"]
    #![doc = include_str!("../guide/recipes/apalis_cron.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/recipes/others.md")]
}

pub mod redis {
    #![doc = include_str!("../guide/redis.md")]
}

pub mod retaining {
    #![doc = include_str!("../guide/retaining.md")]
}

#[cfg(feature = "records")]
pub mod stores {
    #![doc = include_str!("../guide/stores.md")]
    #![cfg_attr(unix, doc = "```")]
    #![cfg_attr(not(unix), doc = "```ignore")]
    #![doc = include_str!("../guide/stores/files.rs")]
    #![doc = "```"]
    #![doc = include_str!("../guide/stores/testing.md")]

    #[cfg(doc)]
    use crate::store::records::{
        Change, Inbox, Message, RecordName, RecordStore, Records, SharedClock, Swap, SwapReply,
        Swapped, Tick, Timestamp,
    };
}

pub mod waiting {
    #![doc = include_str!("../guide/waiting.md")]
}

#[cfg(feature = "zookeeper")]
pub mod zookeeper {
    #![doc = include_str!("../guide/zookeeper.md")]
}
