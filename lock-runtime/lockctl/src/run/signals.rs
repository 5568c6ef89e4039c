//! The signals that are forwarded to the command.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll},
};

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

const FORWARDED: [Signal; 8] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::WINCH,
    Signal::TSTP,
];
/// Those that end a program, and a wait.
pub(super) const ENDING: [Signal; 4] = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM];

pub(super) struct Signals {
    forwarded: Vec<(Signal, unix::Signal)>,
    child: unix::Signal,
}

impl Signals {
    /// Receives the signals from now on, in place of their default actions. Those that the parent
    /// has set to be ignored, as nohup(1) does, stay ignored.
    pub(super) fn new() -> io::Result<Self> {
        let ignored = ignored();
        let is_received = |of: &Signal| ignored >> (of.as_raw() - 1) & 1 == 0;
        let received = |of: Signal| Ok((of, signal(SignalKind::from_raw(of.as_raw()))?));
        Ok(Self {
            forwarded: FORWARDED
                .into_iter()
                .filter(is_received)
                .map(received)
                .collect::<io::Result<_>>()?,
            child: signal(SignalKind::child())?,
        })
    }

    /// The next signal to forward. `None` if a child has changed its state.
    pub(super) async fn next(&mut self) -> Option<Signal> {
        poll_fn(|cx| self.poll(cx)).await
    }

    /// The number of the next signal that ends a wait.
    pub(super) async fn ending(&mut self) -> u8 {
        loop {
            let signal = self.next().await;
            if let Some(signal) = signal.filter(|signal| ENDING.contains(signal)) {
                return u8::try_from(signal.as_raw()).unwrap_or(0);
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Signal>> {
        for (of, received) in &mut self.forwarded {
            if received.poll_recv(cx).is_ready() {
                return Poll::Ready(Some(*of));
            }
        }
        self.child.poll_recv(cx).map(|_| None)
    }
}

/// Ignores the signals that end a process: the keeper of a lock ends with its command.
pub(super) fn ignore() -> io::Result<Signals> {
    Signals::new()
}

/// The signals that this process ignores, as a mask; none where the system does not list them.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0)
}
