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

#[cfg(test)]
mod tests {
    use super::{super::tests::site::Received, *};

    fn inbox() -> (Arc<Received>, Arc<dyn Inbox>) {
        let received = Arc::new(Received::default());
        (received.clone(), received)
    }

    #[test]
    fn each_store_gets_the_messages_until_it_is_dropped() {
        let inboxes = Inboxes::default();
        let [(one, first), (two, second)] = [inbox(), inbox()];
        inboxes.add(Arc::downgrade(&first));
        inboxes.add(Arc::downgrade(&second));
        inboxes.deliver(b"1");
        drop((two, second));
        inboxes.deliver(b"2");
        assert_eq!(*lock(&one.messages), [b"1", b"2"]);
        // Each new one removes those that are gone.
        let (_three, third) = inbox();
        inboxes.add(Arc::downgrade(&third));
        assert_eq!(lock(&inboxes.0).inboxes.len(), 2);
    }

    #[test]
    fn a_lost_connection_and_its_return_are_reported_once() {
        let inboxes = Inboxes::default();
        let (received, inbox) = inbox();
        inboxes.add(Arc::downgrade(&inbox));
        for (is_connected, reported) in [
            (true, &[][..]),
            (false, &[false]),
            (false, &[false]),
            (true, &[false, true]),
            (true, &[false, true]),
        ] {
            inboxes.connected(is_connected);
            assert_eq!(*lock(&received.connections), reported);
        }
    }
}
