//! Loopback ports that a fixture can close and open again.
//!
//! They lie below the range from which a system takes the ports of outgoing connections (32768 and up). Inside that
//! range, a client that retries a closed port can be given that very port for its own end: it then connects to itself,
//! and the restarted server finds its port taken.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
};

/// Room for the bus port of a cluster node (port + 10000) to stay below 32768 too.
const FIRST: u16 = 11_000;
const COUNT: u16 = 11_000;

/// Each process starts at a place of its own and walks on, so that a port is not given twice in a test run.
static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(rand::random_range(0..COUNT)));

/// A port that was free a moment ago. Another process may still be faster: whoever binds it tries again with the next.
pub(crate) fn free_port() -> u16 {
    (0..COUNT)
        .map(|_| FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT)
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("every loopback port from 11000 to 21999 is taken")
}
