//! What a lock cannot promise.
//!
//! # A paused holder still writes
//!
//! 1. A holds the lock and is about to write. Its process is stopped: a debugger, a hypervisor, a laptop lid.
//! 2. The lease runs out. B gets the lock, reads, writes, and is done.
//! 3. A goes on where it was, and writes over B.
//!
//! No check on A's side helps, as A may be stopped between the check and the write. What helps is the resource: A's write
//! carries fencing token 33, B's carried 34, and the resource refuses 33. In SQL, with a column
//! `fence BIGINT NOT NULL DEFAULT 0`:
//!
//! ```sql
//! UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence <= :fence
//! ```
//!
//! No row changed: a later holder has written. Stop, and write nothing more under this lock. The comparison is `<=`, as a
//! holder may write more than once, and a guard that entered again has the token of the outer one. A row that may not
//! exist yet is compared by the same rule:
//!
//! ```sql
//! INSERT INTO orders (id, state, fence) VALUES (:id, 'paid', :fence)
//!     ON CONFLICT (id) DO UPDATE SET state = excluded.state, fence = excluded.fence WHERE orders.fence <= excluded.fence
//! ```
//!
//! A writer that deletes the row deletes the memory of its tokens with it: mark the row as deleted instead.
//!
//! (Martin Kleppmann, [How to do distributed locking]; Redis's own page on [distributed locks] describes the lease side
//! of it.)
//!
//! Where the resource cannot compare, a lock saves work. It does not save correctness: make the work idempotent.
//!
//! # A store that forgets
//!
//! A Redis server that dies without persistence comes back empty and grants every lock anew. Holders find out
//! when the connection breaks or at their next renewal, a third of the lease later at the latest; until then there may be
//! two. A replica that is promoted may lack the last grants, with the same effect. Fencing tokens go on increasing through both, as they follow
//! the server's clock: as long as the clocks of the servers agree better than the outage lasts. Where that is not enough, a majority of
//! [several servers](super::majority) has to agree.
//!
//! # Tokens that were reserved
//!
//! A process that hands a lock from task to task without the store does so under fencing tokens that the store reserved with the
//! grant. A store that has lost its data since may grant another process a larger token meanwhile. So hand-offs stop, and those
//! that were not taken are withdrawn, at the first sign: the connection broke, the Sentinels name another primary, a node of a cluster
//! keeps no slot any more by the cluster's own map. Where there is no sign (`FLUSHALL` on a live connection; a primary that was cut off together with this
//! process) they go on for at most 50 ms from the grant, and the resource refuses those tokens once it has seen a larger one. Over
//! several servers a majority knows the reserved tokens, so nothing of this applies.
//!
//! # Eviction
//!
//! A server whose `maxmemory-policy` evicts may evict a held lock; a warning says so at connect. Set `noeviction`.
//!
//! # Time
//!
//! A lease is counted by the store's clock, validity by the holder's own monotonic clock from *before* the request was
//! sent, less a drift of 1 % and 2 ms. Clocks that run apart faster than 1 % break that. Clocks that are *set* differently do not matter.
//!
//! # Exactly once
//!
//! A lock makes it likely that something is done once at a time. It says nothing about whether it was done before.
//!
//! # The order among processes
//!
//! It is that of the places in the store's line, of which a process has one for all who wait there with the same mode and lease.
//! Two processes take turns, whatever the number of those who wait in each; see [`waiting`](super::waiting). A store that keeps no
//! line (one of your own may not) is asked again after a pause of 2 ms that grows to 500 ms.
//!
//! # Locks that others take away
//!
//! A key that another program deletes or lets expire is not handed over: whoever waits finds that out within a second.
//!
//! [How to do distributed locking]: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
//! [distributed locks]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
