//! Acquires more and more locks in a directory, until it is killed.

use std::{path::PathBuf, sync::Arc};

use lock_runtime::{LockClient, store::RecordStore};
use lock_tests::processes::Parent;

use crate::files::FileRecords;

/// Acquires `<name>:0:a`, `:b` and `:c` in one step, then `<name>:1:a` and so on, and keeps them.
/// Prints the number of each group after it has begun with it.
#[derive(clap::Args)]
pub(crate) struct Hoard {
    directory: PathBuf,
    name: String,
}

impl Hoard {
    pub(crate) async fn run(self, parent: Parent) {
        let records = FileRecords::new(self.directory);
        let locks = LockClient::with_store(Arc::new(RecordStore::new(records)));
        let mut held = Vec::new();
        for group in 0u32.. {
            let keys = ["a", "b", "c"].map(|key| format!("{}:{group}:{key}", self.name));
            parent.say(group.to_string());
            let guard = locks.all(keys).try_acquire().await;
            held.push(guard.expect("the directory works").expect("its own keys"));
        }
    }
}
