//! Loopback ports that a fixture can close and open again.
//!
//! They are below the range of ports for outgoing connections (32768 and up). Inside that range, a
//! client that retries a closed port may be assigned that very port for its own end: it then
//! connects to itself, and the restarted server finds its port taken.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
};

/// Leaves room for the default bus port of a cluster node (port + 10000) below 32768.
const FIRST: u16 = 11_000;
const COUNT: u16 = 11_000;

/// Each process starts at a random port and goes on from there, so that no port is used twice in a
/// test run.
static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(rand::random_range(0..COUNT)));

/// A port that was free a moment ago. Another process may still bind it first: callers then try the
/// next one.
pub(crate) fn free_port() -> u16 {
    (0..COUNT)
        .map(|_| FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT)
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("every loopback port from 11000 to 21999 is taken")
}
