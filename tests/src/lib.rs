//! Fixtures of the workspace's tests: real servers, faults on the wire and in a store, resources
//! that detect a broken lock, other processes, and captured traces. Except for the faulty store,
//! the tasks of a storm, `place` and `replies`, they depend on Redis, TCP and processes only, not
//! on the locks under test.
//!
//! A fixture that fails panics with the cause, since a test could not handle the error any better.
//!
//! | module | content |
//! |---|---|
//! | [`redis_server`] | a real `redis-server` for one test, or for all tests of the process |
//! | [`postgres`] | a real PostgreSQL server for one test, or a database on one for all tests |
//! | [`etcd`] | a real etcd cluster for one test, or one member for all tests |
//! | [`zookeeper`] | a real ZooKeeper ensemble for one test, or one server for all tests |
//! | [`sentinel`] | a primary with two replicas, monitored by three Sentinels |
//! | [`cluster`] | a Redis Cluster of three primaries with a replica each |
//! | [`proxy`] | a TCP proxy that loses replies and messages, delays, cuts, refuses and swallows |
//! | [`faulty_store`] | a `Store` whose operations a test fails, delays, holds back or replaces |
//! | [`fenced`] | a resource that counts overlaps, stale fencing tokens and lost updates |
//! | [`processes`] | worker processes that run this package's code (`lock-worker`) |
//! | [`mod@lockctl`] | the program of lock-runtime, built for the tests |
//! | [`prometheus`] | a Prometheus server that scrapes the processes of a test |
//! | [`storm`] | tasks that request locks in every mode and option, and record the events |
//! | [`traces`] | the `tracing` events of a test |
//! | [`server_clock`] | a wall clock that a test sets, for the servers that it starts |
//! | [`delays`] | the delays of a runtime on a loaded machine |
//! | [`access`] | the rights of users, and the files of certificates |
//! | [`replies`] | the replies of a batch as one result |
//! | [`files`] | the store of the guide, in a directory, with a scheme of URLs |
//! | [`place`] | the stores that a test runs on, with their clients, and limits of time |
//! | [`errors`] | errors as an error reporter prints them |

pub mod access;
pub mod cluster;
pub mod delays;
pub mod errors;
pub mod etcd;
pub mod faulty_store;
pub mod fenced;
pub mod files;
pub mod lockctl;
pub mod place;
pub mod postgres;
pub mod processes;
pub mod prometheus;
pub mod proxy;
pub mod redis_server;
pub mod replies;
pub mod sentinel;
pub mod server_clock;
pub mod storm;
pub mod traces;
pub mod zookeeper;

mod certificates;
mod links;
mod nodes;
mod ports;
mod resp;
mod supervised;

pub use cluster::{RedisCluster, shared_cluster};
pub use delays::Delays;
pub use errors::chain;
pub use etcd::{EtcdCluster, shared_etcd};
pub use faulty_store::FaultyStore;
pub use fenced::{FencedResource, RedisFencedResource};
pub use lock_conformance::Lateness;
pub use lockctl::lockctl;
pub use postgres::{PgBouncer, PostgresServer, shared_postgres};
pub use processes::Worker;
pub use prometheus::Prometheus;
pub use proxy::Proxy;
pub use redis_server::{RedisServer, shared_five, shared_server, unique};
pub use sentinel::{SentinelSet, shared_sentinels};
pub use server_clock::ServerClock;
pub use supervised::Supervised;
pub use traces::Captured;
pub use zookeeper::{ZooKeeperEnsemble, shared_zookeeper};

/// Compiles the snippets of the READMEs and of docs/stores.md.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[doc = include_str!("../../lock-macros/README.md")]
#[doc = include_str!("../../lock-runtime/README.md")]
#[doc = include_str!("../../lock-tower/README.md")]
#[doc = include_str!("../../docs/stores.md")]
pub struct Readme;
