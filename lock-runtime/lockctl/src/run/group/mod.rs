//! The process group of a command.

#[cfg(test)]
mod tests;

use std::{
    io,
    os::unix::process::ExitStatusExt as _,
    process::{Child, ExitStatus},
};

use rustix::{
    process::{
        Pid, Signal, WaitId, WaitIdOptions, getpgrp, getpid, getppid, getsid, kill_process,
        kill_process_group, waitid,
    },
    stdio::{stdin, stdout},
    termios::{isatty, tcgetpgrp, tcsetpgrp},
};

pub(super) struct Group {
    /// The leader. It is waited for last, so that its number, which is that of the group, stays
    /// reserved.
    leader: Child,
    pid: Pid,
    /// The group has the terminal.
    has_terminal: bool,
}

/// A change of the state of the leader.
pub(super) enum Change {
    Ended,
    /// By this signal.
    Stopped(i32),
}

impl Group {
    pub(super) fn of(leader: Child) -> Self {
        let pid = Pid::from_child(&leader);
        // A job of a shell gives the terminal to its command, unless it is one of a pipeline, whose
        // other processes need it as well.
        let has_terminal = is_foreground_job() && tcsetpgrp(stdin(), pid).is_ok();
        Self {
            leader,
            pid,
            has_terminal,
        }
    }

    pub(super) fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Returns the change since the last call. The end is returned each time.
    pub(super) fn change(&self) -> io::Result<Option<Change>> {
        let now = WaitIdOptions::NOHANG | WaitIdOptions::EXITED | WaitIdOptions::STOPPED;
        let of_leader = |options| waitid(WaitId::Pid(self.pid), options);
        let Some(status) = of_leader(now | WaitIdOptions::NOWAIT)? else {
            return Ok(None);
        };
        let Some(signal) = status.stopping_signal() else {
            return Ok(Some(Change::Ended));
        };
        of_leader(WaitIdOptions::NOHANG | WaitIdOptions::STOPPED)?;
        Ok(Some(Change::Stopped(signal)))
    }

    /// Returns the status of a leader that has ended, which is still not waited for.
    pub(super) fn end(&self) -> io::Result<ExitStatus> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let ended = waitid(WaitId::Pid(self.pid), options)?;
        let ended = ended.ok_or(io::ErrorKind::InvalidData)?;
        Ok(match (ended.exit_status(), ended.terminating_signal()) {
            (Some(status), _) => ExitStatus::from_raw((status & 0xff) << 8),
            (None, signal) => ExitStatus::from_raw(signal.unwrap_or(0)),
        })
    }

    pub(super) fn reap(&mut self) -> io::Result<()> {
        self.leader.wait().map(drop)
    }

    /// Sends a signal to all processes of the group.
    pub(super) fn signal(&self, signal: Signal) {
        // The group may have ended.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Sends a signal that ends programs to all processes of the group, stopped ones included: they
    /// receive it when they go on, and with it a command whose terminal is gone would never end.
    pub(super) fn end_by(&self, signal: Signal) {
        self.signal(signal);
        self.signal(Signal::CONT);
    }

    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Stops this process as well, if the group was stopped at its terminal: the shell then
    /// continues. Returns whether that was so, after this process has been continued.
    pub(super) fn stop_with(&self, signal: i32) -> bool {
        if !self.has_terminal {
            return false;
        }
        if wants_terminal(signal) && tcgetpgrp(stdin()).is_ok_and(|owner| owner == self.pid) {
            // It asked for the terminal before it was given.
            self.signal(Signal::CONT);
            return false;
        }
        stop_self()
    }

    /// Stops the group and this process. Returns whether it did, after it has been continued.
    pub(super) fn stop(&self) -> bool {
        if !is_job() {
            return false;
        }
        self.signal(Signal::TSTP);
        stop_self()
    }

    /// Continues the group, with the terminal if this process was continued in the foreground.
    pub(super) fn resume(&self) {
        if self.has_terminal && is_foreground_job() {
            let _ = tcsetpgrp(stdin(), self.pid);
        }
        self.signal(Signal::CONT);
    }

    /// Returns whether the group was given the terminal when it started.
    pub(super) fn has_terminal(&self) -> bool {
        self.has_terminal
    }
}

/// Stops this process, unless there is no shell that could continue it.
fn stop_self() -> bool {
    if is_job() {
        let _ = kill_process(getpid(), Signal::STOP);
    }
    true
}

/// Returns whether a shell with job control has started this process, or the script that it is
/// part of. Otherwise its group is orphaned, as POSIX calls it, and the system does not stop it at
/// Ctrl-Z either: it would never be continued.
fn is_job() -> bool {
    let Some(own) = Stat::of("self") else {
        return getsid(None).is_ok_and(|leader| leader != getpid());
    };
    let mut parent = own.parent;
    // 0 is the parent of the first process.
    while parent != 0 {
        let Some(above) = Stat::of(parent) else {
            return false;
        };
        if above.session != own.session {
            return false;
        }
        if above.group != own.group {
            return true;
        }
        parent = above.parent;
    }
    false
}

/// Numbers of a process as Linux lists them. They are 0 if they are those of a process outside of
/// the PID namespace, such as that of a container, for which rustix has no value.
struct Stat {
    parent: i32,
    group: i32,
    session: i32,
}

impl Stat {
    fn of(process: impl std::fmt::Display) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // Behind the name, which may contain spaces and parentheses, and the state.
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut numbers = fields
            .split_whitespace()
            .skip(1)
            .map_while(|number| number.parse().ok());
        Some(Self {
            parent: numbers.next()?,
            group: numbers.next()?,
            session: numbers.next()?,
        })
    }
}

/// Sends a signal to a process group whose leader may have ended.
pub(super) fn signal(group: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, signal);
    }
}

/// Returns the group that the other process has started without a word about it: it was stopped or
/// killed after the start.
pub(super) fn started_by_parent(key: &str, fence: u64) -> Option<i32> {
    let parent = getppid()?.as_raw_nonzero();
    let children = format!("/proc/{parent}/task/{parent}/children");
    let children = std::fs::read_to_string(children).ok()?;
    let children = children
        .split_whitespace()
        .filter_map(|child| Pid::from_raw(child.parse().ok()?));
    command_among(children, key, fence)
}

/// Returns the group of the command that has this lock in its environment. The other processes may
/// be children of the program that its parent was before `exec`, and if the command was adopted,
/// any daemon of the system.
fn command_among(mut processes: impl Iterator<Item = Pid>, key: &str, fence: u64) -> Option<i32> {
    let has_lock = |child: &Pid| {
        let environment = format!("/proc/{}/environ", child.as_raw_nonzero());
        let environment = std::fs::read(environment).unwrap_or_default();
        let has = |entry: String| {
            let mut entries = environment.split(|byte| *byte == 0);
            entries.any(|it| it == entry.as_bytes())
        };
        has(format!("LOCK_KEY={key}")) && has(format!("LOCK_FENCE={fence}"))
    };
    let leads = |child: &Pid| {
        let number = child.as_raw_nonzero().get();
        Stat::of(number).is_some_and(|stat| stat.group == number)
    };
    let command = processes.find(|child| leads(child) && has_lock(child))?;
    Some(command.as_raw_nonzero().get())
}

/// Returns whether the signal stops a process that uses the terminal of others.
pub(super) fn wants_terminal(signal: i32) -> bool {
    signal == Signal::TTIN.as_raw() || signal == Signal::TTOU.as_raw()
}

fn is_foreground_job() -> bool {
    isatty(stdin())
        && isatty(stdout())
        && leads_group()
        && tcgetpgrp(stdin()).is_ok_and(|foreground| foreground == getpid())
}

fn leads_group() -> bool {
    let own = getpid();
    Stat::of("self").map_or_else(
        || getpgrp() == own,
        |stat| stat.group == own.as_raw_nonzero().get(),
    )
}

/// Returns the exit status of a shell for a command that ended like this.
pub(super) fn status_of(ended: ExitStatus) -> u8 {
    let status = match ended.signal() {
        Some(signal) => 128 + signal,
        None => ended.code().unwrap_or(0),
    };
    u8::try_from(status).unwrap_or(u8::MAX)
}
