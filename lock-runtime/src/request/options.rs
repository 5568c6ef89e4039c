//! The options and modes of a lock, as a list from which the setters of every builder are
//! generated.

/// Calls the macro `$callback` with all options and modes of a lock.
///
/// Each option has its documentation, its argument, if any, and the field of [`LockSpec`] that it
/// sets. Each mode has the rest of a sentence that describes it. Whatever sets options of a lock
/// is generated from this list, or is tested against it.
///
/// [`LockSpec`]: crate::LockSpec
#[doc(hidden)]
#[macro_export]
macro_rules! __lock_options {
    ($($callback:tt)+) => {
        $($callback)+! {
            options {
                /// Sets how long the store keeps the lock without a renewal, 100 ms to 24 h; 30 s
                /// by default.
                ///
                /// The lease determines *how fast a crash is noticed, not how long the lock may be
                /// held*: a live holder renews it every third of its length. A short lease frees a
                /// dead holder's lock sooner, and is lost sooner when the store is unreachable.
                lease(lease: ::core::time::Duration) { lease: lease }

                /// Sets how long to wait for the lock; 10 s by default, 2 s in a layer of
                /// lock-tower.
                wait(wait: ::core::time::Duration) { wait: Wait::AtMost(wait) }

                /// Disables waiting: the request fails with `Contended` if the lock is not free.
                no_wait() { wait: Wait::No }

                /// Enables renewal if the defaults disable it.
                renew() { renew: true }

                /// Disables renewal: the lock ends with its lease, regardless of its holder
                /// (Redisson's `leaseTime`).
                no_renew() { renew: false }

                /// Makes the lock re-entrant: code within a scope that holds the lock can enter it
                /// again, without a round trip.
                ///
                /// The lease, renewal, `min_hold`, `max_hold` and mode of a request that re-enters
                /// have no effect: those of the outer lock apply. A write within a read is
                /// refused (`WouldDeadlock`).
                reentrant() { reentrant: true }

                /// Disables re-entry if the defaults enable it: within a scope that holds the
                /// lock, the request fails with `WouldDeadlock`.
                no_reentrant() { reentrant: false }

                /// Keeps the lock for at least `min_hold`, even if it is released earlier; 24 h at
                /// most, and at most the longest lease of the store. It counts from the grant, by
                /// the clock of this process until the release and by that of the store from then
                /// on. With several keys, it counts for all of them from the grant of the last one,
                /// and a request that is refused leaves none of them reserved.
                ///
                /// A release that the store does not confirm is repeated for the rest of
                /// `min_hold`. If the store cannot be reached until the lease ends, or the process
                /// ends, the lock is free with its lease. A lock that is revoked is free at once.
                ///
                /// This is for jobs that are triggered on every replica: a replica whose clock is
                /// late must still find the lock held (ShedLock's `lockAtLeastFor`).
                min_hold(min_hold: ::core::time::Duration) { min_hold: min_hold }

                /// Ends renewal after `max_hold`; 365 days at most. The lock is then lost with
                /// `MaxHold`, so that a holder that hangs does not hold it forever (ShedLock's
                /// `lockAtMostFor`). It counts from the sending of the request that was granted
                /// or, after a wait, from the hand-off. There is none by default; in a layer of
                /// lock-tower, it is a minute.
                max_hold(max_hold: ::core::time::Duration) { max_hold: MaxHold::AtMost(max_hold) }

                /// Removes the `max_hold` of the defaults: the lock is renewed for as long as it
                /// is held.
                no_max_hold() { max_hold: MaxHold::No }

                /// Gives other processes a turn between any two holders of this process.
                ///
                /// Without strict order, a released lock is handed off to a waiter in the same
                /// process without a call to the store, 32 times or for 50 ms in a row. Only then
                /// does it go to the next process in the queue. This is many times faster if one
                /// process has many waiters. With strict order, every release goes through the
                /// store, and processes take strict turns.
                strict_order() { strict_order: true }

                /// Allows local hand-offs if the defaults require strict order.
                no_strict_order() { strict_order: false }

                /// Keeps a released lock in this process for up to `retain`, 24 h at most, for its
                /// next use here: a request for the same key with the same lease takes it without a
                /// call to the store. Zero, the default, retains nothing.
                ///
                /// This is for exclusive locks that one process uses many times in a row: the items
                /// of a partition, the sessions of a route with sticky clients. If a request of
                /// another client has to wait for the lock, this process releases it at once, and
                /// does not retain it for a while. If the process dies, the lock is free with its
                /// lease, as if it were held: use a short lease.
                ///
                /// A lock is not retained after a wait in the queue of the store, in strict order,
                /// without renewal, with a `min_hold`, or once it was extended. Over several
                /// servers (`redlock://`) the request is refused. The guide page `retaining` of
                /// lock-runtime has more.
                retain(retain: ::core::time::Duration) { retain: retain }

                /// Limits the requests that wait for the key in this process behind the head of
                /// the queue. Further requests fail with `Overloaded` at once.
                ///
                /// For each request, the smaller of this limit and that of the client
                /// (`LockClientBuilder::max_waiters`) applies. A request that does not wait does
                /// not enter the queue, so this limit never refuses it.
                max_waiters(max_waiters: usize) { max_waiters: max_waiters }

                /// Sets the treatment of a body under the lock when the lock is lost; `Cancel` by
                /// default. A request that re-enters has a setting of its own.
                on_lost(on_lost: $crate::OnLost) { on_lost: on_lost }
            }
            modes {
                exclusive() {
                    "an exclusive lock: one holder, as the writer of a read/write lock.",
                    Mode::Exclusive
                }
                shared() {
                    "a shared lock: many holders, none of them exclusive, as the readers of a \
             read/write lock.",
                    Mode::Shared
                }
                permits(permits: ::core::num::NonZeroU32) {
                    "one of `permits` permits: at most that many holders. A request counts all \
             holders against its own number, also those that requested another one.",
                    Mode::Permits(permits)
                }
            }
        }
    };
}

/// Defines the setters of all options and modes for a type that has a [`LockSpec`]. The type has
/// a method `with`, which replaces its spec by a function of the spec. `$verb` begins the
/// documentation of the modes.
///
/// [`LockSpec`]: crate::LockSpec
#[doc(hidden)]
#[macro_export]
macro_rules! __lock_setters {
    (
        options {
            $(
                $(#[$doc:meta])*
                $option:ident($($arg:ident: $of:ty)?) { $field:ident: $value:expr }
            )*
        }
        modes {
            $( $mode:ident($($count:ident: $of_count:ty)?) { $text:literal, $variant:expr } )*
        }
    ) => {
        $(
            $(#[$doc])*
            pub fn $option(self $(, $arg: $of)?) -> Self {
                self.with(|spec| spec.$option($($arg)?))
            }
        )*
        $(
            #[doc = concat!("Requests ", $text)]
            pub fn $mode(self $(, $count: $of_count)?) -> Self {
                self.with(|spec| $crate::LockSpec::$mode($($count)?).or(&spec))
            }
        )*
    };
}
