//! What a store tells unasked.

use tokio::sync::mpsc;

use super::message::{Grant, Hold, Token};

/// Something a store tells unasked. **A hint, never the truth**: every event may be lost, doubled or late.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreEvent {
    /// A request that stood in line holds its lock now, for a short time (PROTOCOL 4).
    Granted {
        /// The acquisition.
        hold: Hold,
        /// Its grant.
        grant: Grant,
    },
    /// A lock was revoked.
    Revoked {
        /// The acquisition that held it.
        token: Token,
    },
    /// The connection to the store broke and is being made again: what was pushed meanwhile is lost, and so may be the store's data.
    Disconnected,
}

/// The receiving end of a store's events.
#[derive(Debug)]
pub struct Events(mpsc::UnboundedReceiver<StoreEvent>);

impl Events {
    /// A channel; the store keeps the sender.
    pub fn channel() -> (mpsc::UnboundedSender<StoreEvent>, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (sender, Self(receiver))
    }

    /// A store without events.
    pub fn none() -> Self {
        Self::channel().1
    }

    /// The next event; `None` when the store sends no more. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<StoreEvent> {
        self.0.recv().await
    }
}
