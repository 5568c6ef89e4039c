//! The inboxes of the stores of locks over one database.

use std::{
    mem::replace,
    sync::{Arc, Mutex, Weak},
};

use super::Inbox;
use crate::shell::sync::lock;

#[derive(Default)]
pub(in crate::store) struct Inboxes(Mutex<InboxState>);

#[derive(Default)]
struct InboxState {
    inboxes: Vec<Weak<dyn Inbox>>,
    /// They know that messages may be lost.
    is_lost: bool,
}

impl Inboxes {
    /// Passes messages to `inbox` as well.
    pub(in crate::store) fn add(&self, inbox: Weak<dyn Inbox>) {
        let inboxes = &mut lock(&self.0).inboxes;
        inboxes.retain(|inbox| inbox.strong_count() > 0);
        inboxes.push(inbox);
    }

    fn all(&self) -> Vec<Arc<dyn Inbox>> {
        let state = lock(&self.0);
        state.inboxes.iter().filter_map(Weak::upgrade).collect()
    }

    pub(in crate::store) fn deliver(&self, message: &[u8]) {
        self.all().iter().for_each(|inbox| inbox.deliver(message));
    }

    /// Informs them if that has changed.
    pub(in crate::store) fn connected(&self, is_connected: bool) {
        if replace(&mut lock(&self.0).is_lost, !is_connected) == is_connected {
            for inbox in self.all() {
                inbox.connected(is_connected);
            }
        }
    }
}
