//! `lockctl run`: a command under a lock.
//!
//! Two processes watch each other, since a process that was killed or stopped cannot end its
//! command. This one starts the command in a process group of its own. Its *keeper* holds the lock,
//! in another process:
//!
//! - If the keeper dies, or its last message has run out, this process ends the command.
//! - If this process dies, the keeper kills the command, and leaves the lock to its lease.

mod group;
mod keeper;
mod message;
mod signals;

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt as _,
    process::{Command, ExitStatus},
    time::Duration,
};

use lock_runtime::time::{Instant, sleep_until};
use rustix::process::Signal;

pub(crate) use self::keeper::keep;
use self::{
    group::{Change, Group},
    keeper::Keeper,
    message::{Order, Report},
    signals::Signals,
};
use crate::{
    Failure,
    args::{Run, Store},
    status,
};

/// Before the lock runs out, the keeper is asked this many times whether it has been renewed, at
/// this interval. Earlier reports may be outdated, or missing, as this process can be stopped.
const QUESTIONS: u32 = 5;
const ANSWER: Duration = Duration::from_millis(50);
const SILENT: &str = "the lease has ended, and the process that held the lock does not answer";
/// The time for the release of the lock, and for the end of the keeper.
const PARTING: Duration = Duration::from_secs(5);

pub(crate) async fn run(store: &Store, run: Run) -> Result<u8, Failure> {
    let Run {
        lock,
        pass_url,
        skip,
        command,
    } = run;
    let mut lock = lock;
    lock.no_wait |= skip && lock.wait.is_none();
    lock.quiet = skip || store.json;
    let (_, url) = store.settings()?;
    lock.spec().check()?;
    let mut signals = Signals::new()?;
    let mut keeper = Keeper::start(store, &url, &lock, &command)?;
    let (fence, until) = tokio::select! {
        granted = granted(&mut keeper) => match granted {
            Err(refused) if skip && is_held(&refused) => return Ok(0),
            granted => granted?,
        },
        signal = signals.ending() => {
            keeper.leave(PARTING).await;
            return Ok(128 + signal);
        }
    };
    if until <= Instant::now() || keeper.order(&Order::Starting).is_err() {
        keeper.dismiss(PARTING).await;
        return Err(lost(
            "lost_expired",
            "the lock was lost before the command was started",
        ));
    }
    let group = match start(&command, &lock.key, fence, pass_url) {
        Ok(group) => group,
        Err(error) => {
            keeper.dismiss(PARTING).await;
            return Err(not_started(&command, &error));
        }
    };
    // If the keeper is gone, its end is the next report.
    let _ = keeper.order(&Order::Started { group: group.id() });
    let running = Running {
        group,
        keeper,
        signals,
        until,
        questions: 0,
        asked_at: Instant::now(),
        grace: lock.grace,
        loss: None,
        kill_at: None,
        is_suspended: false,
    };
    running.until_ended().await
}

/// Returns whether the reason is that others hold the lock. A session of the database that has
/// locked its record runs no job.
fn is_held(refused: &Failure) -> bool {
    matches!(&*refused.code, "contended" | "wait_timeout")
}

/// Waits for the lock. Returns the fencing token, and the time until which the lock is held.
async fn granted(keeper: &mut Keeper) -> Result<(u64, Instant), Failure> {
    match keeper.report().await {
        Some(Report::Granted { fence, until }) => Ok((fence, message::instant(until))),
        Some(Report::Refused {
            status,
            code,
            message,
        }) => Err(Failure {
            status,
            code,
            message,
        }),
        _ => Err(Failure {
            status: status::ERROR,
            code: "keeper".into(),
            message: "the process that was to hold the lock has ended".into(),
        }),
    }
}

fn start(command: &[OsString], key: &str, fence: u64, pass_url: bool) -> io::Result<Group> {
    let [program, arguments @ ..] = command else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mut started = Command::new(program);
    started.args(arguments).process_group(0);
    started.env("LOCK_KEY", key);
    started.env("LOCK_FENCE", fence.to_string());
    if !pass_url {
        // It may have a password, and a command seldom needs it.
        started.env_remove("LOCK_URL");
    }
    Ok(Group::of(started.spawn()?))
}

fn not_started(command: &[OsString], error: &io::Error) -> Failure {
    let program = command.first().map(|program| program.to_string_lossy());
    // ENOEXEC, which has no kind, is that of a file in another format.
    let is_no_program = error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error());
    let (status, code) = match error.kind() {
        io::ErrorKind::NotFound => (status::NOT_FOUND, "not_found"),
        io::ErrorKind::PermissionDenied => (status::NOT_EXECUTABLE, "not_executable"),
        _ if is_no_program => (status::NOT_EXECUTABLE, "not_executable"),
        // Such as too many processes.
        _ => (status::ERROR, "not_started"),
    };
    Failure {
        status,
        code: code.into(),
        message: format!("cannot start {}: {error}", program.unwrap_or_default()),
    }
}

fn lost(code: &str, message: impl Into<String>) -> Failure {
    Failure {
        status: status::LOST,
        code: code.into(),
        message: message.into(),
    }
}

/// A command that runs under its lock.
struct Running {
    group: Group,
    keeper: Keeper,
    signals: Signals,
    /// The end of the time for which the keeper has reported the lock as held.
    until: Instant,
    /// The number of questions without an answer, and the time of the latest one.
    questions: u32,
    asked_at: Instant,
    grace: Duration,
    loss: Option<Failure>,
    /// When the processes are killed that have survived the loss.
    kill_at: Option<Instant>,
    /// The command was stopped at the terminal, and this process with it. It goes on once the
    /// keeper confirms that the lock is still held.
    is_suspended: bool,
}

impl Running {
    async fn until_ended(mut self) -> Result<u8, Failure> {
        let ended = loop {
            // The state may have changed before the signals were watched.
            match self.group.change()? {
                Some(Change::Ended) => break self.group.end()?,
                Some(Change::Stopped(signal)) => {
                    self.stopped(signal);
                    continue;
                }
                None => {}
            }
            let deadline = self.deadline();
            tokio::select! {
                biased;
                signal = self.signals.next() => {
                    self.signalled(signal);
                }
                report = self.keeper.report(), if self.loss.is_none() => self.reported(report),
                () = sleep_until(deadline) => self.deadline_passed(),
            }
        };
        self.conclude(ended).await
    }

    fn signalled(&mut self, signal: Option<Signal>) {
        match signal {
            Some(Signal::TSTP) => {
                self.is_suspended = self.group.stop();
                let _ = self.keeper.order(&Order::Report);
            }
            Some(signal) if signals::ENDING.contains(&signal) => self.group.end_by(signal),
            Some(signal) => self.group.signal(signal),
            // The change of the child is read in the next turn.
            None => {}
        }
    }

    fn reported(&mut self, report: Option<Report>) {
        match report {
            Some(Report::Granted { until, .. } | Report::Valid { until }) => {
                // Those from before this process was stopped may be outdated.
                self.until = message::instant(until).max(self.until);
                if self.until > Instant::now() + ANSWER * QUESTIONS {
                    self.questions = 0;
                }
                if self.is_suspended && Instant::now() < self.until {
                    self.is_suspended = false;
                    self.group.resume();
                }
            }
            Some(Report::Lost { code, message }) => self.lost(lost(&code, message)),
            _ => self.lost(lost(
                "lost_keeper",
                "the process that held the lock has ended",
            )),
        }
    }

    fn lost(&mut self, loss: Failure) {
        if self.loss.is_none() {
            self.loss = Some(loss);
            self.group.end_by(Signal::TERM);
            let _ = self.keeper.order(&Order::Ending);
            self.kill_at = Some(Instant::now() + self.grace);
        }
    }

    /// When something is to be done without a message.
    fn deadline(&self) -> Instant {
        let asking = ANSWER * (QUESTIONS - self.questions);
        let next = self.until.checked_sub(asking).unwrap_or(self.until);
        // After a stop, each question still has its time.
        let next = next.max(self.asked_at + ANSWER);
        self.kill_at.unwrap_or(next)
    }

    fn deadline_passed(&mut self) {
        if self.kill_at.is_some() {
            self.group.kill();
            self.kill_at = Some(Instant::now() + self.grace.max(Duration::from_secs(1)));
        } else if self.questions < QUESTIONS {
            self.questions += 1;
            self.asked_at = Instant::now();
            let _ = self.keeper.order(&Order::Report);
        } else {
            self.lost(lost("lost_expired", SILENT));
        }
    }

    fn stopped(&mut self, signal: i32) {
        // This process has stopped together with the group, and was continued first: stopping once
        // more would leave both stopped.
        if self.is_suspended {
            return;
        }
        if self.group.stop_with(signal) {
            self.is_suspended = true;
            let _ = self.keeper.order(&Order::Report);
        } else if group::wants_terminal(signal) && !self.group.has_terminal() {
            tracing::warn!(
                "the command waits for the terminal; give it another input, such as </dev/null"
            );
        }
    }

    async fn conclude(mut self, ended: ExitStatus) -> Result<u8, Failure> {
        if self.loss.is_some() {
            // Processes that have outlived the command.
            self.group.kill();
        }
        let is_expired = self.until <= Instant::now();
        let mut dismissed = self.keeper.dismiss(PARTING).await;
        if is_expired && !dismissed.is_confirmed && dismissed.loss.is_none() {
            // This process was stopped, and the keeper was stopped or killed.
            dismissed.loss = Some(lost("lost_expired", SILENT));
        }
        if dismissed.loss.is_some() {
            self.group.kill();
        }
        // Until here its number could not become that of another process.
        self.group.reap()?;
        if let Some(loss) = self.loss.or(dismissed.loss) {
            return Err(loss);
        }
        if let Some(warning) = dismissed.warning {
            tracing::warn!("{warning}");
        }
        Ok(group::status_of(ended))
    }
}
