//! `lockctl`, the locks of a store on the command line.
//!
//! ```sh
//! cargo install lockctl # Unix only
//! export LOCK_URL=redis://127.0.0.1:6379/0
//! lockctl ls order:
//! ```
//!
//! It needs nothing but the URL, in any form that [`connect`](crate::LockClient::connect) takes
//! except `memory:`. All variables of
//! [`from_env`](crate::LockClient::from_env) apply, so a container of the service has the right
//! settings already. `--url` and `--namespace` replace theirs. `lockctl help COMMAND` explains each
//! command, `lockctl completions SHELL` prints a completion script, and `lockctl man` the manual
//! page. On Redis, `ls` needs the command `SCAN`.
//!
//! | command | shows or does |
//! |---|---|
//! | `ls [PREFIX]` | the locks that are held, by whom, since when, the time left, the waiters |
//! | `inspect KEY` | the holders of a lock or of permits, with their identifiers, and the waiters |
//! | `revoke KEY` | shows the holders, asks, and takes the lock away from exactly those |
//! | `revoke KEY --holder ID` | without asking, if that holder still has the lock |
//! | `revoke --prefix PREFIX` | the same for all locks of a prefix, for development |
//! | `doctor` | the state of the store and of each server, and the remedy for each finding |
//! | `run --key KEY -- COMMAND` | runs a command under a lock |
//!
//! `--json` prints an object on each line, with times in ms or the unit that the name ends with.
//! Errors go to standard error, with `--json` as an object with `code` and `error`, and so do
//! warnings, such as of a variable that is misspelt or a server that may evict a lock.
//!
//! # A command under a lock
//!
//! ```sh
//! # One backup at a time, in the whole fleet. Another host gives up at once.
//! lockctl run --key backup --no-wait -- pg_dump shop -f /backup/shop.sql
//!
//! # Cron starts it everywhere; one host runs it, also if it ends within a second. The others exit
//! # with 0 and print nothing.
//! lockctl run --key nightly --skip --min-hold 1m -- ./report.sh
//!
//! # At most three imports at a time.
//! lockctl run --key import --permits 3 --wait 1h -- ./import.sh
//! ```
//!
//! The command has `LOCK_KEY` and `LOCK_FENCE`, the fencing token of the grant, in its environment,
//! beside what lockctl has in its own, except `LOCK_URL`, which may have a password: `--pass-url`
//! passes it on, for a command that uses locks itself. Let it send the token with each write, for a
//! resource that [compares them](crate::guide::holding#fencing).
//!
//! - It runs in a process group of its own. SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2 and
//!   SIGWINCH are forwarded to the group. As the only job at a terminal it has the terminal: Ctrl-C
//!   and Ctrl-Z work. Stopped by Ctrl-Z it keeps the lock. In a pipeline or a script the terminal
//!   stays with that, and a command that reads from it stops; SIGHUP, SIGINT, SIGQUIT and SIGTERM
//!   continue it, so that it ends.
//! - The list of locks shows it as `pg_dump@host:pid`, with the name of the command, unless
//!   `LOCK_IDENTITY` is set. If it waits for longer than a second, it names the holder.
//! - The lease is renewed while the command runs, also a long one.
//! - If the lock is lost (revoked, `--max-hold`, a store that does not answer for the length of the
//!   lease), the group gets SIGTERM, and SIGKILL after `--grace`. Processes of the group that are
//!   left when the command has ended are killed.
//! - A second process holds the lock. If `lockctl` is killed by SIGKILL, that process kills the
//!   group, and the lock becomes free at the end of its lease. If the second process is killed or
//!   stopped, the command gets SIGTERM before the lock can be granted to others.
//! - When the command ends by itself, the lock is released. Processes that it has left in the
//!   background go on without the lock.
//!
//! | exit status | meaning |
//! |---|---|
//! | of the command | it has ended; 128 + n if signal n ended it |
//! | 1 | nothing was revoked; `doctor`: the store is degraded |
//! | 2 | invalid command line |
//! | 69 | the store does not answer |
//! | 70 | another error |
//! | 75 | the lock is held by others: the wait is over |
//! | 76 | the lock was lost: the command was ended, or has ended after the loss |
//! | 78 | the URL, the password, the rights, the server or the format of its data do not fit |
//! | 126, 127 | the command cannot be executed, or was not found |
//!
//! # Limits
//!
//! - A process that leaves the process group (`setsid`, a daemon) is not ended with it.
//! - After SIGTERM the command has the grace period. If the lease ends meanwhile, another process
//!   gets the lock: choose a grace period that is shorter than a third of the lease, or `0s`.
//! - If both processes of `run` are killed at the same moment, such as by `pkill -9 -f lockctl`,
//!   the command goes on without a lock. Only the fencing token protects the resource then.
//! - The command is ended when the lease has ended by the clock of this host. As for every lease,
//!   its last write may arrive later: see the page on [limits](crate::guide::limits).
//! - `ls` takes no snapshot: locks that come and go meanwhile may be missing.
//! - In Redis, the time for which readers and permits have been held is not known (`-`).
