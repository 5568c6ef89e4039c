//! One connection through the proxy: selection and delay of its messages, and its end.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use super::{Faults, Flow, Shared, Then};
use crate::resp;

/// Separation of a stream of bytes into messages.
#[derive(Clone, Copy, Debug)]
pub(super) enum Framing {
    Redis,
    /// A message is what arrives at once. It need not be a whole one of its protocol.
    Any,
}

impl Framing {
    fn message_len(self, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::Redis => resp::message_len(bytes),
            Self::Any => Some(bytes.len()).filter(|&length| length > 0),
        }
    }
}

/// One client connected to the server.
pub(super) struct Connection {
    shared: Arc<Shared>,
    framing: Framing,
    /// The number of cuts when it was accepted.
    cuts: u64,
    state: Mutex<State>,
}

/// A std mutex around it: it is held for a few instructions, never across an await.
#[derive(Default)]
struct State {
    /// Faults for the replies to the commands in flight, in their order.
    replies: VecDeque<Option<Then>>,
    /// A message was lost; the connection closes with the next `let_through`.
    broken: bool,
    /// No further data go to the client.
    silent: bool,
}

/// Decision about a message.
enum Verdict {
    Pass(Duration),
    Swallow,
    Close,
}

impl Connection {
    pub(super) fn new(shared: Arc<Shared>, framing: Framing) -> Self {
        let cuts = shared.faults.borrow().cuts;
        Self {
            shared,
            framing,
            cuts,
            state: Mutex::default(),
        }
    }

    /// Returns when either side has closed, or a fault closes it; both sockets are closed then.
    pub(super) async fn run(&self, client: TcpStream, target: SocketAddr) {
        let faults = self.shared.faults.subscribe();
        let heals = faults.borrow().heals;
        let transfer = async {
            let server = TcpStream::connect(target).await?;
            // The test alone decides on delays, not Nagle's algorithm.
            client.set_nodelay(true)?;
            server.set_nodelay(true)?;
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::select! {
                ended = pump(from_client, to_server, self.framing, |message| self.command(message)) => ended,
                ended = pump(from_server, to_client, self.framing, |message| self.reply(message)) => ended,
            }
        };
        tokio::select! {
            biased;
            () = self.closed_by_a_fault(faults, heals) => {}
            // The result is visible at both ends of the connection.
            _ = transfer => {}
        }
    }

    async fn closed_by_a_fault(&self, mut faults: watch::Receiver<Faults>, mut heals: u64) {
        loop {
            {
                let faults = faults.borrow_and_update();
                if faults.cuts > self.cuts || (faults.heals > heals && self.state().broken) {
                    return;
                }
                heals = faults.heals;
            }
            if faults.changed().await.is_err() {
                return;
            }
        }
    }

    fn command(&self, message: &[u8]) -> Verdict {
        let name = resp::command_name(message);
        // The faults stay locked meanwhile: `let_through` must not come between the loss and its
        // mark.
        let mut verdict = Verdict::Close;
        self.shared.faults.send_if_modified(|faults| {
            verdict = self.command_under(faults, &name);
            false
        });
        verdict
    }

    fn command_under(&self, faults: &mut Faults, name: &str) -> Verdict {
        let mut state = self.state();
        if faults.cuts > self.cuts {
            return Verdict::Close;
        }
        if matches!(faults.flow, Flow::Nothing) {
            state.broken = true;
            return Verdict::Swallow;
        }
        // In version 3 these are confirmed by pushes, and have no reply.
        if !name.ends_with("SUBSCRIBE") {
            let drop = faults
                .drop
                .as_mut()
                .and_then(|drop| drop.hits(name).then_some(drop.then));
            match self.framing {
                Framing::Redis => state.replies.push_back(drop),
                // Pieces and replies cannot be paired: the fault is for the next reply.
                Framing::Any => state.replies.extend(drop.map(Some)),
            }
        }
        Verdict::Pass(faults.delay_to_server)
    }

    fn reply(&self, message: &[u8]) -> Verdict {
        let faults = self.shared.faults.borrow();
        let mut state = self.state();
        if faults.cuts > self.cuts {
            return Verdict::Close;
        }
        if faults.drop_messages && resp::is_published(message) {
            self.shared
                .dropped_messages
                .send_modify(|dropped| *dropped += 1);
            return Verdict::Swallow;
        }
        let push = resp::is_push(message);
        let drop = if push {
            None
        } else {
            state.replies.pop_front().flatten()
        };
        let swallow = state.silent || drop.is_some() || !matches!(faults.flow, Flow::Both);
        if !swallow {
            return Verdict::Pass(faults.delay_to_client);
        }
        state.broken = true;
        state.silent |= matches!(drop, Some(Then::Silence));
        if !push {
            self.shared.dropped.send_modify(|dropped| *dropped += 1);
        }
        if matches!(drop, Some(Then::Close)) {
            Verdict::Close
        } else {
            Verdict::Swallow
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies messages, each judged when it is read and written when its delay is over.
async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    framing: Framing,
    judge: impl Fn(&[u8]) -> Verdict,
) -> io::Result<()> {
    let (queue, mut due) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let read = async move {
        let mut buffer = Vec::with_capacity(16 * 1024);
        while from.read_buf(&mut buffer).await? > 0 {
            let mut passed = 0;
            while let Some(length) = framing.message_len(&buffer[passed..]) {
                let message = &buffer[passed..passed + length];
                passed += length;
                match judge(message) {
                    Verdict::Pass(delay) => {
                        _ = queue.send((Instant::now() + delay, message.to_vec()))
                    }
                    Verdict::Swallow => {}
                    // Messages queued before are still written: the queue ends after them.
                    Verdict::Close => return Ok(()),
                }
            }
            buffer.drain(..passed);
        }
        io::Result::Ok(())
    };
    let write = async move {
        while let Some((at, message)) = due.recv().await {
            if at > Instant::now() {
                sleep_until(at).await;
            }
            to.write_all(&message).await?;
        }
        Ok(())
    };
    tokio::try_join!(read, write).map(|_| ())
}
