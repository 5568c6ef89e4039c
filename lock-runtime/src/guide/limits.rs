//! The limits of a lease lock, and the remedies.
//!
//! # A paused holder still writes
//!
//! 1. A holds the lock and is about to write. Its process is stopped by a debugger, a hypervisor
//!    or a closed laptop.
//! 2. The lease runs out. B gets the lock, reads, writes and releases it.
//! 3. A continues and overwrites the data of B.
//!
//! No check in A can prevent this, because A may be stopped between the check and the write. The
//! resource can: A's write carries fencing token 33, B's carried 34, and the resource refuses 33.
//! **[`fencing`](super::fencing) shows how**: with a function for transactions of PostgreSQL, with
//! a column in other databases, and with a script in Redis.
//!
//! (See Martin Kleppmann, [How to do distributed locking][Kleppmann]. The Redis page on
//! [distributed locks] describes the lease.)
//!
//! Where the resource cannot compare tokens, a lock saves work, but it does not ensure
//! correctness. Make the work idempotent.
//!
//! # A task that blocks its runtime
//!
//! Locks are renewed by a task of the client, on the application's runtime. A task that computes
//! for long, or that calls blocking code, may keep that task from running, also where other workers
//! are idle: Tokio leaves a task that was woken last to the worker that is blocked, and may leave
//! timers and sockets to it as well.
//!
//! Therefore one thread of the process, the *keeper*, looks after all clients while they hold
//! locks. Half of a lease after the last renewal it renews the lock itself, on a runtime and
//! connections of its own, which it opens only then. It also releases guards that were dropped half
//! a second before, and notices losses. A warning in the log says so.
//!
//! The keeper calls a store of your own only if its
//! [`serves_any_runtime`](crate::store::Store::serves_any_runtime) says so. With less than half of
//! a lease for a new connection and a reply, as with leases of less than a second to a database far
//! away, it may come too late. It cannot run in a process that is stopped or starved, and the task
//! that blocks cannot be cancelled.
//!
//! # A store that loses data
//!
//! A Redis server that crashes without persistence comes back empty and grants every lock again.
//! The old holders notice when the connection breaks, or at their next renewal, at most a third
//! of the lease later. Until then a lock may have two holders. A promoted replica that lacks the
//! last grants has the same effect.
//!
//! Fencing tokens keep increasing in both cases, because they follow the clock of the server.
//! This holds if the clocks of the servers differ by less than the duration of the outage. Where
//! that is not sufficient, use a majority of [several servers](super::majority).
//!
//! # Tokens that were reserved
//!
//! A process hands a lock off between its own tasks without the store. For that it uses a block
//! of fencing tokens that the store reserved with the grant. If the store has lost its data
//! since, it may grant a larger token to another process in the meantime.
//!
//! Local hand-offs therefore stop at the first sign of lost data, and those that no task has
//! taken yet are withdrawn. Signs are a broken connection, a new primary named by the Sentinels,
//! and a cluster node that no longer keeps any slot according to the cluster's map.
//!
//! Without a sign they continue for at most 50 ms after the grant. Examples are `FLUSHALL` on a
//! live connection, and a primary that was cut off together with this process. The resource
//! refuses such a token once it has seen a larger one.
//!
//! With several servers a majority knows the reserved tokens, so none of this applies.
//!
//! # Eviction
//!
//! A server whose `maxmemory-policy` evicts keys may evict a held lock. The client logs a warning
//! when it connects to such a server. Set `noeviction`.
//!
//! # Time
//!
//! The lease is measured by the clock of the store. The validity is measured by the holder's own
//! monotonic clock, from *before* the request was sent, less a drift of 1 % and 2 ms. Clocks that
//! drift apart by more than 1 % break this.
//!
//! The clocks of clients may be *set* to any time, and may be set while they run. That of the
//! store must not be set by more than a fraction of a lease:
//!
//! - Set **forward**, it ends leases, reservations (`min_hold`) and queue entries early, all at
//!   once. Another holder is granted the lock at once; the first one notices with its next
//!   renewal.
//! - Set **back**, it lets the store keep each of them for longer, by the length of the step. A
//!   holder notices at its next renewal, and corrects its lease with the one after that. A process
//!   that ends before that, or a reservation, blocks its lock for the step; `revoke` frees it.
//!   Queue entries from before the step are dropped if it was longer than ten seconds, and live
//!   waiters queue again. Locks exclude each other and fencing tokens increase all the same.
//!
//! Let the clocks of servers be corrected gradually, not in steps.
//!
//! The time for which the machine is suspended counts, as with a closed laptop: for validity and
//! loss, `min_hold`, `max_hold`, the quarantine of a server and every estimate of its clock.
//!
//! | system | |
//! |---|---|
//! | Linux, Android | `CLOCK_BOOTTIME` counts it |
//! | macOS, iOS | `CLOCK_MONOTONIC` counts it; there, `std` has another clock |
//! | Windows | the clock of `std` counts it |
//! | others, such as FreeBSD | not counted: after waking, a holder may rely on its lease |
//!
//! After waking, [`is_lost`](crate::HeldLock::is_lost) and [`validity`](crate::HeldLock::validity)
//! are right at the first look. Timers stand still in suspension:
//! [`lost`](crate::HeldLock::lost) resolves, and a locked body ends, about a second later.
//!
//! A virtual machine that its host pauses, or moves to another host, often has no clock that goes
//! on meanwhile. This is a [paused holder](#a-paused-holder-still-writes) that does not know it.
//!
//! # Exactly once
//!
//! A lock makes it likely that only one caller at a time does the work. It does not record
//! whether the work was done before.
//!
//! # The order among processes
//!
//! Processes are served in the order of their entries in the wait queue of the store. A process
//! has one entry for all its waiters with the same mode and lease. Two processes take turns,
//! whatever the number of waiters in each; see [`waiting`](super::waiting).
//!
//! A custom store may keep no wait queue. The client then polls it, first after 2 ms, with a
//! backoff up to 500 ms.
//!
//! # Locks that other programs remove
//!
//! A key that another program deletes or lets expire is not handed off. A waiter notices within a
//! second.
//!
//! [Kleppmann]: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
//! [distributed locks]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
