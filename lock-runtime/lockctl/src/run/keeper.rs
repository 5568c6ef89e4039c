//! The process that holds the lock of a command, seen from both sides.

use std::{
    ffi::OsString,
    io::{self, BufRead as _, Write as _},
    os::unix::process::CommandExt as _,
    path::PathBuf,
    pin::pin,
    process::{self, Stdio},
    thread,
    time::Duration,
};

use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockGuard,
    text::{brief, visible},
    time::{Instant, timeout_at},
};
use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::mpsc,
    time::{interval, sleep, timeout},
};

use super::{
    group,
    message::{self, Order, Report},
    signals,
};
use crate::{
    Failure,
    args::{Lock, Store},
    table::client,
};

/// The wait after which its reason is printed.
const EXPLAINED: Duration = Duration::from_secs(1);
/// The interval at which the keeper looks for renewals to report.
const REPORTS: Duration = Duration::from_millis(100);
/// The time that the other process has to end a command whose lock is lost.
const RESPONSE: Duration = Duration::from_millis(500);
/// The interval at which the keeper looks for a command that may have been started.
const LOOK: Duration = Duration::from_millis(10);

/// The keeper, in the process of the command.
pub(super) struct Keeper {
    process: Child,
    orders: Option<ChildStdin>,
    reports: Lines<BufReader<ChildStdout>>,
}

/// The last messages of the keeper.
#[derive(Default)]
pub(super) struct Dismissed {
    /// The lock was lost before it could be released.
    pub(super) loss: Option<Failure>,
    /// The reason if the release was not confirmed.
    pub(super) warning: Option<String>,
    /// The keeper has replied.
    pub(super) is_confirmed: bool,
}

impl Keeper {
    pub(super) fn start(
        store: &Store,
        url: &str,
        lock: &Lock,
        held_for: &[OsString],
    ) -> io::Result<Self> {
        // Also if the file was replaced by a newer version in the meantime.
        let own = PathBuf::from("/proc/self/exe");
        let program = if own.exists() {
            own
        } else {
            std::env::current_exe()?
        };
        let mut command = process::Command::new(program);
        command
            .arg0("lockctl")
            .arg("keep")
            .args(store.json.then_some("--json"))
            .args(lock.arguments())
            // Not an argument: it may have a password.
            .env("LOCK_URL", url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C reaches the whole process group of the terminal.
            .process_group(0);
        if let Some(namespace) = &store.namespace {
            command.env("LOCK_NAMESPACE", namespace);
        }
        if std::env::var_os("LOCK_IDENTITY").is_none_or(|name| name.is_empty()) {
            let host = gethostname::gethostname();
            let host: String = host.to_string_lossy().chars().take(64).collect();
            // The command tells an operator more than this program.
            let program = held_for.first().map(PathBuf::from);
            let program = program.as_ref().and_then(|program| program.file_name());
            let program = program.map(|name| name.to_string_lossy());
            let program: String = program
                .iter()
                .flat_map(|name| name.chars())
                .take(32)
                .collect();
            let name = format!("{program}@{host}:{}", process::id());
            command.env("LOCK_IDENTITY", name);
        }
        let mut process = Command::from(command).spawn()?;
        let (Some(orders), Some(reports)) = (process.stdin.take(), process.stdout.take()) else {
            unreachable!("both were asked for as pipes just above");
        };
        Ok(Self {
            process,
            orders: Some(orders),
            reports: BufReader::new(reports).lines(),
        })
    }

    /// The next report. `None` once the keeper has ended.
    pub(super) async fn report(&mut self) -> Option<Report> {
        let line = self.reports.next_line().await.ok()??;
        message::parse(&line)
    }

    pub(super) fn order(&mut self, order: &Order) -> io::Result<()> {
        let Some(orders) = &self.orders else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let mut line = Vec::new();
        message::write(order, &mut line)?;
        // A few short lines fit into the pipe: this does not block.
        let mut pipe = PipeEnd(orders);
        pipe.write_all(&line)
    }

    /// Lets the keeper release the lock.
    pub(super) async fn dismiss(&mut self, patience: Duration) -> Dismissed {
        let _ = self.order(&Order::Ended);
        let mut dismissed = Dismissed::default();
        let released = async {
            loop {
                match self.report().await {
                    Some(Report::Released { warning }) => {
                        dismissed.is_confirmed = true;
                        return warning;
                    }
                    Some(Report::Lost { code, message }) => {
                        dismissed.loss = Some(super::lost(&code, message));
                    }
                    Some(_) => {}
                    None => return Some("not released; its lease will end".into()),
                }
            }
        };
        let late = || Some("not released in time; its lease will end".to_owned());
        dismissed.warning = timeout(patience, released).await.unwrap_or_else(|_| late());
        self.leave(patience).await;
        dismissed
    }

    /// Closes the pipe, and waits for the end of the keeper.
    pub(super) async fn leave(&mut self, patience: Duration) {
        self.orders = None;
        if timeout(patience, self.process.wait()).await.is_err() {
            // It was stopped.
            let _ = self.process.start_kill();
        }
    }
}

/// Writes to the pipe without a task.
struct PipeEnd<'a>(&'a ChildStdin);

impl io::Write for PipeEnd<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        use std::os::fd::AsFd as _;

        Ok(rustix::io::write(self.0.as_fd(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Holds a lock for the process at the other end of standard input and output.
pub(crate) async fn keep(store: &Store, lock: Lock) -> Result<u8, Failure> {
    let _ignored = signals::ignore()?;
    rustix::io::ioctl_fionbio(rustix::stdio::stdout(), true).map_err(io::Error::from)?;
    let mut orders = orders();
    let (builder, url) = store.settings()?;
    let connecting = builder.connect(&url);
    let Some(locks) = unless_dismissed(&mut orders, connecting).await else {
        return Ok(0);
    };
    let acquiring = locks.request(&*lock.key, lock.spec()).name("lockctl run");
    let acquiring = async {
        let mut acquiring = pin!(acquiring.acquire().into_future());
        match timeout(EXPLAINED, &mut acquiring).await {
            Ok(granted) => granted,
            Err(_) if lock.quiet => acquiring.await,
            Err(_) => tokio::select! {
                granted = &mut acquiring => granted,
                () = explain(&locks, &lock) => acquiring.await,
            },
        }
    };
    let granted = unless_dismissed(&mut orders, acquiring).await;
    let Some(guard) = granted else {
        // The request leaves the wait queue.
        locks.shutdown().await;
        return Ok(0);
    };
    report(&Report::Granted {
        fence: guard.fence().into(),
        until: message::time_after(guard.validity()),
    });
    let released = Keeping {
        guard,
        orders,
        grace: lock.grace,
        command: Started::No,
        is_ending: false,
    };
    released.until_ended().await;
    locks.shutdown().await;
    Ok(0)
}

/// Says on which holder the command waits.
async fn explain(locks: &LockClient, lock: &Lock) {
    let found = match lock.permits {
        Some(_) => locks.inspect(&*lock.key).permits().await,
        None => locks.inspect(&*lock.key).await,
    };
    let Ok(found) = found else { return };
    let key = visible(&lock.key);
    let holder = match &found.holders[..] {
        [] => String::new(),
        [first, others @ ..] => {
            let others = match others.len() {
                0 => String::new(),
                others => format!(" and {others} others"),
            };
            let since = first.held_for.map(|time| format!(" for {}", brief(time)));
            format!(
                ", held by {}{}{others}",
                client(first),
                since.unwrap_or_default()
            )
        }
    };
    let _ = writeln!(io::stderr(), "lockctl: waiting for {key}{holder}");
}

/// Waits for a result, which is reported if it is an error, unless the other process gives up.
async fn unless_dismissed<T>(
    orders: &mut mpsc::UnboundedReceiver<Order>,
    result: impl IntoFuture<Output = Result<T, LockError>>,
) -> Option<T> {
    tokio::select! {
        result = result.into_future() => match result {
            Ok(value) => Some(value),
            Err(error) => {
                let Failure { status, code, message } = error.into();
                report(&Report::Refused { status, code, message });
                None
            }
        },
        _ = orders.recv() => None,
    }
}

/// The end of a command whose lock is lost.
enum End {
    OfCommand,
    /// Of the process that was to end the command.
    OfProcess,
    Late,
}

struct Keeping {
    guard: LockGuard,
    orders: mpsc::UnboundedReceiver<Order>,
    grace: Duration,
    command: Started,
    /// The other process ends the command.
    is_ending: bool,
}

/// Whether the command runs.
enum Started {
    No,
    /// Perhaps.
    Soon,
    Yes {
        group: i32,
    },
}

impl Keeping {
    async fn until_ended(mut self) {
        let lost = self.guard.lost();
        tokio::pin!(lost);
        let (mut reports, mut renewals) = (interval(REPORTS), 0);
        loop {
            tokio::select! {
                error = &mut lost => {
                    let Failure { code, message, .. } = error.into();
                    report(&Report::Lost { code, message });
                    return self.lost().await;
                }
                order = self.orders.recv() => match order {
                    Some(Order::Ended) => return self.release().await,
                    Some(order) => self.note(&order),
                    None => return self.abandoned().await,
                },
                _ = reports.tick() => {
                    if self.guard.renewals() != renewals {
                        renewals = self.guard.renewals();
                        self.report_validity();
                    }
                }
            }
        }
    }

    fn note(&mut self, order: &Order) {
        match order {
            Order::Starting => self.command = Started::Soon,
            Order::Started { group } => self.command = Started::Yes { group: *group },
            Order::Report => self.report_validity(),
            Order::Ending => self.is_ending = true,
            Order::Ended => {}
        }
    }

    fn report_validity(&self) {
        let until = message::time_after(self.guard.validity());
        report(&Report::Valid { until });
    }

    async fn release(self) {
        let released = self.guard.release().await;
        // The lock is free: now this process can wait until the other one reads.
        let _ = rustix::io::ioctl_fionbio(rustix::stdio::stdout(), false);
        let warning = match released {
            Ok(()) => None,
            Err(error) if matches!(error.kind(), LockErrorKind::Lost(_)) => {
                let Failure { code, message, .. } = error.into();
                report(&Report::Lost { code, message });
                None
            }
            Err(error) => Some(format!("not released: {error:#}")),
        };
        report(&Report::Released { warning });
    }

    /// The other process ends the command. If it does not, it was stopped or killed.
    async fn lost(mut self) {
        let since = Instant::now();
        let mut end = self.end_by(since + RESPONSE).await;
        if let End::Late = end {
            // A second SIGTERM would make some programs end at once.
            let margin = match self.is_ending {
                true => RESPONSE,
                false => {
                    self.signal(Signal::TERM);
                    self.signal(Signal::CONT);
                    Duration::ZERO
                }
            };
            end = self.end_by(since + RESPONSE + self.grace + margin).await;
        }
        match end {
            End::OfCommand => {}
            // Without the other process the number of the group may become that of another one.
            End::OfProcess | End::Late => self.kill().await,
        }
    }

    async fn end_by(&mut self, deadline: Instant) -> End {
        let end = async {
            while let Some(order) = self.orders.recv().await {
                match order {
                    Order::Ended => return End::OfCommand,
                    order => self.note(&order),
                }
            }
            End::OfProcess
        };
        timeout_at(deadline, end).await.unwrap_or(End::Late)
    }

    /// The other process was killed. Processes that have left the group of the command may still
    /// be at work, so the lock is left to its lease.
    async fn abandoned(self) {
        if let Started::No = self.command {
            return self.release().await;
        }
        self.kill().await;
        // Without destructors, which would release the lock.
        process::exit(1);
    }

    async fn kill(&self) {
        // A process that is about to execute the command cannot be recognised yet.
        let until = Instant::now() + RESPONSE;
        while !self.signal(Signal::KILL) && Instant::now() < until {
            sleep(LOOK).await;
        }
    }

    /// Sends a signal to the command. Returns whether its group is known.
    fn signal(&self, signal: Signal) -> bool {
        let group = match self.command {
            Started::No => None,
            Started::Soon => {
                let (key, fence) = (self.guard.key(), self.guard.fence());
                group::started_by_parent(key.as_str(), fence.into())
            }
            Started::Yes { group } => Some(group),
        };
        if let Some(group) = group {
            group::signal(group, signal);
        }
        group.is_some()
    }
}

/// Writes a report, unless the pipe is full, which it is if the other process was stopped for long:
/// waiting for it would end the renewals. A line is written as a whole, or not at all.
fn report(report: &Report) {
    let mut line = Vec::new();
    if message::write(report, &mut line).is_ok() {
        let _ = rustix::io::write(rustix::stdio::stdout(), &line);
    }
}

/// Reads orders on a thread, since a task that waits for input would delay the end of the process.
fn orders() -> mpsc::UnboundedReceiver<Order> {
    let (sender, orders) = mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let order = line.ok().and_then(|line| message::parse(&line));
            let Some(order) = order else { return };
            if sender.send(order).is_err() {
                return;
            }
        }
    });
    orders
}
