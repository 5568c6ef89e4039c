//! Several independent servers, of which a majority has to agree (Redlock).
//!
//! One server may die, be stopped or come back without its data: with three servers one, with five two. No lock is lost
//! by it, none is given to a second holder, and nobody waits for the dead.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::connect("redlock:redis://10.0.0.1,redis://10.0.0.2,redis://10.0.0.3").await?;
//! // The same, with settings:
//! let locks = LockClient::builder()
//!     .namespace("shop")
//!     .longest_lease(std::time::Duration::from_secs(60))
//!     .redlock(["rediss://app:secret@10.0.0.1", "rediss://app:secret@10.0.0.2", "rediss://app:secret@10.0.0.3"])
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! Guards, errors, the attribute and the layer are the same as over one server. `Unavailable` says of each server what it answered.
//!
//! # The servers
//!
//! - An odd number, three or five. A fourth one would let no more of them fail than three.
//! - Independent: on machines of their own, and none a replica of another. A replica is refused, and so is a server that is listed twice.
//! - In the same order for all clients: it decides which of them keeps the order of those who wait.
//! - Persistence is not needed: what a server forgets, the others know.
//!
//! # The first half minute
//!
//! A server that was restarted may have forgotten a lock that its holder still counts on. So it does not vote until it has been
//! up for `longest_lease` (30 s by default), by its own `INFO`; nor where a marker that clients keep in each namespace is younger than
//! that, as its data may have been deleted. **New servers, and a new namespace, therefore grant nothing for the first half minute**: a
//! request that does not wait so long is `Unavailable`, and says in how many seconds they vote. All clients set the same
//! `longest_lease`; a longer lease is refused as `InvalidSpec`.
//!
//! Who holds a lock when a server comes back is given its vote again with the next renewal after that, so servers may be restarted one
//! by one, `longest_lease` apart, under locks that are held for days.
//!
//! # What it costs
//!
//! A message to each server for every operation, all at once: one round trip to the slower of the majority. A server that has not
//! answered lately is left in peace for half a second at a time.
//!
//! # Waiting
//!
//! Clients that ask all servers at once split the votes. So for each lock one of the servers, found from its name, keeps the
//! order: who waits stands in the line of that server as in that of a single one, is told when it is its turn, and then asks the
//! others. A handover takes two round trips. If that server does not answer, votes alone decide, and the next one keeps the order. Two clients
//! that each hold some of the votes give them back after a while of their own, twenty milliseconds and ten round trips or so.
//!
//! A client that died between its votes holds no request up for long: a majority of free servers
//! grants. A request that does not wait looks a second time after that while, and one that waits
//! has the lock within 250 ms and a few tens of round trips of the moment at which a majority is
//! free. A reader that waits takes up to half a second: it has to find out whether the writer in
//! front of it lives, behind which it stays. For that each process that waits for a lock asks the server with the line some twelve
//! times a second, and less often where answers take long.
//!
//! Several locks of one request are asked for one after the other: a round trip for each.
//!
//! # Fencing tokens
//!
//! No two grants have the same, and they increase over any sequence of majorities: before a guard
//! is handed out, a majority of the servers has given its token to it alone, and any later majority
//! has one of those among it. The client proposes a number, its clock in microseconds or more;
//! where a majority answers that number, that is all, and where the servers are out of step the
//! largest is written back first. Readers that come at the same time may need a round trip more,
//! each for a number of its own; those tokens are in no order among each other. See
//! [`QuorumStore`](crate::store::QuorumStore).
//!
//! While clients of a version before this one read the same locks, a reader of theirs may have the
//! token of another reader.
//!
//! It breaks if a majority of the servers lose their data within a day, and clocks are set further apart than the time in which
//! nobody could get a lock: `longest_lease`.
//!
//! # What it does not promise
//!
//! - [A paused holder still writes](super::limits). Only the fencing token helps, here as there.
//! - The clocks of clients may be set as they like, but must not *run* apart from the servers' by more than 1 %. The clock of a
//!   server must not be *set forward* by more than a lease while somebody holds a lock, nor by more than `longest_lease` soon after it was
//!   started: what it counts by its clock (expiry, uptime, the marker's age) would end early.
//! - Permits: of five servers with two permits each, three clients can have three. They are refused as `InvalidSpec`.
