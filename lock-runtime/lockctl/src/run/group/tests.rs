use std::{
    os::unix::process::CommandExt as _,
    process::{Child, Command},
};

use rustix::process::Pid;

use super::command_among;

/// A process that is killed at the end of the test.
struct Process(Child);

impl Process {
    fn start(lock: Option<(&str, &str)>, leads_group: bool) -> Self {
        let mut command = Command::new("sleep");
        command
            .arg("1000")
            .env_remove("LOCK_KEY")
            .env_remove("LOCK_FENCE");
        if let Some((key, fence)) = lock {
            command.env("LOCK_KEY", key).env("LOCK_FENCE", fence);
        }
        if leads_group {
            command.process_group(0);
        }
        let process = Self(command.spawn().unwrap());
        // It has its environment a moment after its start.
        let environment = format!("/proc/{}/environ", process.0.id());
        while std::fs::read(&environment).unwrap().is_empty() {
            std::thread::yield_now();
        }
        process
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that was adopted is among the daemons of the system: none of them may be killed.
#[test]
fn only_the_command_of_the_lock_is_found_among_other_processes() {
    let others = [
        Process::start(None, true),
        Process::start(Some(("a", "71")), true),
        Process::start(Some(("ab", "7")), true),
        // It is in the group of others.
        Process::start(Some(("a", "7")), false),
    ];
    let among = |processes: &[&Process]| {
        command_among(processes.iter().map(|process| process.pid()), "a", 7)
    };
    let [one, two, three, four] = &others;
    assert_eq!(among(&[one, two, three, four]), None);
    let command = Process::start(Some(("a", "7")), true);
    let id = command.pid().as_raw_nonzero().get();
    assert_eq!(among(&[one, two, three, four, &command]), Some(id));
}
