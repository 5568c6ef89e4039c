//! A call to the database that begins while its runtime shuts down.

use std::{
    future::pending,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use futures_util::FutureExt as _;
use lock_runtime::{
    EtcdOptions, PostgresOptions,
    operator::ClientId,
    store::{Records, etcd::EtcdRecords, postgres::PostgresRecords, zookeeper::ZooKeeperRecords},
};
use lock_tests::{
    place::{eventually, in_time},
    shared_etcd, shared_postgres, shared_zookeeper, unique,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::Instant,
};

/// Begins calls when it is dropped, with its runtime.
struct CallsOnDrop(Arc<dyn Records>);

impl Drop for CallsOnDrop {
    fn drop(&mut self) {
        let _ = self.0.read(&[]).now_or_never();
        let _ = self.0.expect_messages(ClientId::random()).now_or_never();
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// The runtime drops the tasks of the calls on the spot. It ends, and the next one receives
/// messages.
fn ends_and_another_receives_messages(connect: impl AsyncFn() -> Arc<dyn Records>) {
    // The connections of some stores belong to the runtime that makes them.
    let mut servers = Builder::new_multi_thread();
    let servers = servers.worker_threads(1).enable_all().build().unwrap();
    let first = runtime();
    let records = servers.block_on(connect());
    let late = CallsOnDrop(records.clone());
    first.block_on(async {
        tokio::spawn(async move {
            pending::<()>().await;
            drop(late);
        });
        tokio::task::yield_now().await;
    });
    let (over, is_over) = mpsc::channel();
    thread::spawn(move || {
        drop(first);
        over.send(())
    });
    let ended = is_over.recv_timeout(Duration::from_secs(20));
    assert!(ended.is_ok(), "the runtime does not end");

    let client = ClientId::random();
    runtime().block_on(in_time(eventually("messages are received", async || {
        let began = Instant::now();
        records.expect_messages(client).await;
        // Otherwise it waits for its time limit.
        began.elapsed() < Duration::from_millis(500)
    })));
}

#[test]
fn a_runtime_with_late_calls_to_postgres_ends_and_another_receives_messages() {
    ends_and_another_receives_messages(async || {
        let url = shared_postgres().await.new_database().await;
        let options = PostgresOptions::default();
        let records = PostgresRecords::connect(&url, "lock", options).await;
        Arc::new(records.unwrap()) as _
    });
}

#[test]
fn a_runtime_with_late_calls_to_etcd_ends_and_another_receives_messages() {
    ends_and_another_receives_messages(async || {
        let (url, namespace) = (shared_etcd().await.url(), unique("ns"));
        let records = EtcdRecords::connect(&url, &namespace, EtcdOptions::new()).await;
        Arc::new(records.unwrap()) as _
    });
}

#[test]
fn a_runtime_with_late_calls_to_zookeeper_ends_and_another_receives_messages() {
    ends_and_another_receives_messages(async || {
        let (url, namespace) = (shared_zookeeper().await.url(), unique("ns"));
        let records = ZooKeeperRecords::connect(&url, &namespace).await;
        Arc::new(records.unwrap()) as _
    });
}
