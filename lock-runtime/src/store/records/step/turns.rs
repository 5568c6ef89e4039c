//! The order of the operations of this process on a contended record.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use tokio::sync::{Mutex as Queue, OwnedMutexGuard};

use super::super::RecordName;
use crate::shell::sync::lock;

/// The number of records from which on those without an operation are removed.
const MANY: usize = 1024;

/// One operation at a time for each contended record, in the order of their coming.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<RecordName, Weak<Queue<()>>>>);

impl Turns {
    /// Waits until the earlier operations on this record have ended.
    pub(crate) async fn wait(&self, name: &RecordName) -> OwnedMutexGuard<()> {
        let queue = {
            let mut queues = lock(&self.0);
            if queues.len() >= MANY {
                queues.retain(|_, queue| queue.strong_count() > 0);
            }
            match queues.get(name).and_then(Weak::upgrade) {
                Some(queue) => queue,
                None => {
                    let queue = Arc::new(Queue::new(()));
                    queues.insert(name.clone(), Arc::downgrade(&queue));
                    queue
                }
            }
        };
        queue.lock_owned().await
    }
}
