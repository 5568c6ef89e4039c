//! The ZooKeeper store, on real ensembles. `tests/run.sh --stores` installs them.

mod access;
mod faults;
mod operators;

use lock_runtime::LockClient;
use lock_tests::{ZooKeeperEnsemble, unique};

/// A client of an ensemble with a namespace of its own.
async fn client(ensemble: &ZooKeeperEnsemble) -> LockClient {
    client_of(ensemble, &unique("ns")).await
}

async fn client_of(ensemble: &ZooKeeperEnsemble, namespace: &str) -> LockClient {
    let builder = LockClient::builder().namespace(namespace);
    builder.connect(&ensemble.url()).await.unwrap()
}
