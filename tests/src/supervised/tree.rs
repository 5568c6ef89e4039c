//! Signals to a child together with its own children, such as the processes of a database server.

use std::{fs, io, io::Write, thread, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

use super::Supervised;

impl Supervised {
    /// Sends `signal` to the children of the child, and then to the child, which starts no other
    /// children in the meantime.
    pub(crate) fn signal_tree(&mut self, signal: Signal) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        while !is_stopped(self.child)? {
            thread::sleep(Duration::from_millis(1));
        }
        for child in children(self.child)? {
            // One that has ended is a zombie, because its parent does not run.
            kill_process(child, signal)?;
        }
        self.signal(signal)
    }

    /// Kills the child with its children, waits until all of them have ended, and keeps the
    /// directory.
    pub(crate) fn kill_keeping_directory(mut self) -> io::Result<()> {
        if let Some(input) = &mut self.supervisor.stdin {
            input.write_all(b"keep\n")?;
        }
        self.signal_tree(Signal::STOP)?;
        let children = children(self.child)?.into_iter();
        let children: Result<Vec<_>, _> = children
            .map(|child| pidfd_open(child, PidfdFlags::empty()))
            .collect();
        self.signal_tree(Signal::KILL)?;
        for child in children? {
            poll(&mut [PollFd::new(&child, PollFlags::IN)], None)?;
        }
        while !self.log.borrow().ended {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Whether a stop signal has taken effect. The state follows the name, which is in parentheses.
fn is_stopped(process: Pid) -> io::Result<bool> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    match stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next())
    {
        Some('T') => Ok(true),
        None | Some('Z' | 'X') => Err(io::Error::other("the child has ended")),
        _ => Ok(false),
    }
}

/// The children of a process with one thread.
fn children(process: Pid) -> io::Result<Vec<Pid>> {
    let list = fs::read_to_string(format!("/proc/{process}/task/{process}/children"))?;
    let pids = list.split_whitespace().map(|pid| {
        let pid = pid.parse().ok().and_then(Pid::from_raw);
        pid.ok_or_else(|| io::Error::other(format!("no list of processes: {list}")))
    });
    pids.collect()
}
