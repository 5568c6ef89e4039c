//! Several independent servers, a majority of which must agree (Redlock).
//!
//! With three servers one may fail, with five two: crash, be stopped or come back without its
//! data. No lock is lost, no lock gets a second holder, and no request waits for the failed
//! server.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use lock_runtime::{LockClient, RedisOptions};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let url = "redlock:redis://10.0.0.1,redis://10.0.0.2,redis://10.0.0.3";
//! let locks = LockClient::connect(url).await?;
//!
//! // The same, with settings:
//! let locks = LockClient::builder()
//!     .namespace("shop")
//!     .redis(RedisOptions::new().longest_lease(Duration::from_secs(60)))
//!     .connect_redlock([
//!         "rediss://app:secret@10.0.0.1",
//!         "rediss://app:secret@10.0.0.2",
//!         "rediss://app:secret@10.0.0.3",
//!     ])
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! Guards, errors, the attribute and the layer are the same as with one server. The message of an
//! `Unavailable` error lists the reply of each server.
//!
//! # The servers
//!
//! - Use an odd number, three or five. Four servers tolerate no more failures than three.
//! - They must be independent: on separate machines, and none a replica of another. A replica is
//!   refused, and so is a server that is listed twice.
//! - All clients list the same servers in the same order. The order decides which server is the
//!   coordinator of a lock. See [settings](#settings-that-all-clients-share).
//! - Persistence is not needed: the others still know the data that one server lost.
//!
//! # The first half minute
//!
//! A server that was restarted may have forgotten a lock that its holder still relies on. It
//! therefore does not vote until its uptime, as reported by `INFO`, exceeds `longest_lease` (30 s
//! by default).
//!
//! Its data may also have been deleted without a restart. Clients keep a marker in each
//! namespace, and a server whose marker is younger than `longest_lease` does not vote either.
//!
//! **New servers, and a new namespace, therefore grant nothing for the first half minute.** A
//! request with a shorter wait is refused as `Unavailable`, and the error gives the number of
//! seconds until the servers vote.
//!
//! A longer lease is refused as `InvalidSpec`.
//!
//! A holder regains the vote of a restarted server with the first renewal after that time. So
//! servers can be restarted one by one, `longest_lease` apart, while locks are held for days.
//!
//! # Settings that all clients share
//!
//! The `longest_lease`, and so the time without a vote, the number of the servers and their order
//! have to be the same in all clients of a namespace. Otherwise a server that has forgotten a lock
//! would vote too early for the clients with longer leases. Each server keeps the settings of its
//! clients under `f:<namespace>:settings`, such as `30000 ms, server 1 of 3`. A client with other
//! settings is refused as `InvalidSpec` when it connects, and the clients that run are not
//! affected.
//!
//! To change them:
//!
//! 1. Stop all clients of the namespace.
//! 2. Delete the key on every server.
//! 3. Start the clients with the new settings, not before the longest lease of the old ones has
//!    ended.
//!
//! Or use another namespace, if locks of the old one need not exclude those of the new one. A
//! server that is replaced by an empty one at the same position needs none of this. A client does
//! not notice that another client has another server at one position: change the list of all
//! clients before the old server can be reached again. Clients of earlier versions neither read
//! nor write the key.
//!
//! # Cost
//!
//! Each operation sends one message to each server, all at the same time. It takes one round trip
//! to the slowest server of the fastest majority. A server that did not answer recently is not
//! called for half a second at a time.
//!
//! Several locks of one request are acquired one after the other, with one round trip each, within
//! half of the lease (see [several keys](crate::guide::modes#several-keys)).
//!
//! # Waiting
//!
//! Clients that ask all servers at the same time split the votes. So each lock has a coordinator,
//! a server found from the name of the lock. It keeps the wait queue as a single server does. A
//! waiter queues there. A holder knows which waiter is next, and hands the lock off to it at all
//! servers with its release, so a turn of a contended lock takes one round trip. The first turn
//! takes two, as no waiter is known yet: the waiter is notified by the coordinator, and then asks
//! the other servers.
//!
//! A next waiter whose process has been killed is passed over. One that is stopped keeps the lock
//! for its lease, at most three seconds.
//!
//! If the coordinator does not answer, only the votes decide, and the next server becomes the
//! coordinator. Two clients that each hold some of the votes give them back after different
//! pauses, of about 20 ms and ten round trips.
//!
//! A client that died while it collected votes does not block a request for long, because a
//! majority of free servers can grant the lock:
//!
//! | Request | Granted |
//! |---|---|
//! | does not wait | at a second attempt, after that pause |
//! | waits | within 250 ms and a few tens of round trips after a majority is free |
//! | waits, as a reader | within half a second |
//!
//! A reader takes longer because it must find out whether the writer in front of it is alive. If
//! so, it stays behind that writer. For this purpose each process that waits for a lock polls the
//! coordinator about twelve times a second, and less often where replies take long.
//!
//! # Fencing tokens
//!
//! No two grants have the same fencing token, and tokens increase over any sequence of
//! majorities. Before a guard is returned, a majority of the servers has given its token to this
//! grant alone, and any later majority includes one of those servers.
//!
//! The client proposes a number, its clock in microseconds or more. If a majority answers that
//! number, nothing else is needed. If the servers are out of step, the largest number is written
//! back first.
//!
//! Readers that come at the same time may need one more round trip, each for a number of its own.
//! The tokens of such readers are in no order. See [`QuorumStore`](crate::store::QuorumStore).
//!
//! While clients of an earlier version use the same locks, one of their readers may have the
//! token of another reader.
//!
//! The order of the tokens breaks if a majority of the servers lose their data within a day and
//! their clocks differ by more than the time in which no client could get a lock
//! (`longest_lease`).
//!
//! # Limits
//!
//! - [A paused holder still writes](super::limits). Only the fencing token helps, as with one
//!   server.
//! - The clocks of the clients may be set to any time, but they must not *run* more than 1 %
//!   faster or slower than those of the servers.
//! - The clock of a server must not be *set forward* by more than a lease while a lock is held,
//!   nor by more than `longest_lease` soon after the server was started. All times that it
//!   measures (expiry, uptime, the age of the marker) would end early. Set *back*, it delays them;
//!   see [time](super::limits#time).
//! - Permits are refused as `InvalidSpec`: of five servers with two permits each, three clients
//!   could hold three.
