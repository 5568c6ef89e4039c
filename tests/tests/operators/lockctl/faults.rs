//! Faults while a command runs: a lost lock, processes that are killed or stopped, a store that is
//! away.

use lock_tests::{
    Lateness,
    place::{LONG, eventually},
};
use std::{process::Stdio, time::Duration};
use tokio::time::{Instant, sleep, timeout};

use super::{Store, child_of, ends, is_running, send, spawned, state, with_signals};

const LEASE: Duration = Duration::from_secs(2);
/// The end of a process, after the time that it waits for.
const A_LITTLE: Duration = Duration::from_secs(1);

/// Prints its number, and the end of the command.
const POLITE: &str = "trap 'echo ended; exit 3' TERM; echo $$; while :; do sleep 0.05; done";
/// Ignores SIGTERM, as its child does.
const STUBBORN: &str = "trap '' TERM; sleep 1000 & echo $!; echo $$; while :; do sleep 0.05; done";

fn arguments<'a>(grace: &'a str, script: &'a str) -> [&'a str; 8] {
    [
        "run",
        "--key=a",
        "--lease=2s",
        "--wait=1m",
        grace,
        "--",
        "sh",
        script,
    ]
}

impl Store {
    fn run(&self, grace: &str, script: &str) -> super::Running {
        let mut arguments = arguments(grace, "-c").to_vec();
        arguments.push(script);
        self.running(&arguments)
    }

    async fn revoke(&self) {
        let locks = self.client().await;
        locks.revoke("a").await.unwrap();
    }
}

async fn number(running: &mut super::Running) -> u32 {
    running.line().await.parse().unwrap()
}

#[tokio::test]
async fn a_lost_lock_ends_the_command() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", POLITE);
    let command = number(&mut running).await;
    store.revoke().await;
    assert_eq!(running.line().await, "ended");
    let (status, errors) = running.ended().await;
    assert_eq!(status, 76);
    assert!(errors.contains("revoked"), "{errors}");
    assert!(!is_running(command));
}

#[tokio::test]
async fn a_command_that_takes_its_time_gets_sigterm_once() {
    let store = Store::start().await;
    let script = "trap 'echo term; got=1' TERM; echo $$; until [ $got ]; do sleep 0.05; done; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.1; done; echo end";
    let mut running = store.run("--grace=10s", script);
    number(&mut running).await;
    store.revoke().await;
    assert_eq!(running.line().await, "term");
    assert_eq!(running.line().await, "end");
    assert_eq!(running.ended().await.0, 76);
}

#[tokio::test]
async fn a_command_that_ignores_sigterm_is_killed_with_its_children() {
    const GRACE: Duration = Duration::from_millis(500);
    let store = Store::start().await;
    let mut running = store.run("--grace=500ms", STUBBORN);
    let (child, command) = (number(&mut running).await, number(&mut running).await);
    let (since, late) = (Instant::now(), Lateness::start());
    store.revoke().await;
    sleep(GRACE / 2).await;
    let both = is_running(command) && is_running(child);
    assert!(both || since.elapsed() > GRACE, "in the grace period");
    assert_eq!(running.ended().await.0, 76);
    let (waited, longest) = (since.elapsed(), late.allows(GRACE + A_LITTLE));
    assert!(waited > GRACE && waited < longest, "{waited:?} {longest:?}");
    ends(child).await;
}

#[tokio::test]
async fn children_that_outlive_a_lost_command_are_killed() {
    let store = Store::start().await;
    let script = "(trap '' TERM; echo $BASHPID; exec sleep 1000) & sleep 1000";
    let mut arguments = arguments("--grace=1m", "-c").to_vec();
    arguments[6] = "bash";
    arguments.push(script);
    let mut running = store.running(&arguments);
    let child = number(&mut running).await;
    store.revoke().await;
    assert_eq!(running.ended().await.0, 76);
    ends(child).await;
}

#[tokio::test]
async fn a_signal_is_forwarded_to_the_whole_group() {
    let store = Store::start().await;
    for (signal, status) in [("TERM", 143), ("INT", 130), ("HUP", 129), ("USR1", 138)] {
        let mut running = store.run("--grace=5s", "echo $$; sleep 1000 & wait");
        let child = child_of(number(&mut running).await, "sleep").await;
        send(signal, running.id()).await;
        let ended = running.ended().await;
        assert_eq!(ended.0, status, "{signal}: {ended:?}");
        if signal != "INT" {
            // A shell lets its background processes ignore SIGINT.
            ends(child).await;
        } else {
            send("KILL", child).await;
        }
        assert!(!store.is_held("a").await, "{signal}");
    }
}

#[tokio::test]
async fn when_lockctl_is_killed_its_command_dies_and_the_next_starts_when_the_lease_ends() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", STUBBORN);
    let (child, command) = (number(&mut running).await, number(&mut running).await);
    let mut next = store.run("--grace=10s", "echo started");
    let client = store.client().await;
    let is_waiting = || async { !client.inspect("a").await.unwrap().waiters.is_empty() };
    eventually("the next one waits", is_waiting).await;
    let (since, late) = (Instant::now(), Lateness::start());
    let left = client.inspect("a").await.unwrap().holders[0].ttl.unwrap();
    send("KILL", running.id()).await;
    assert_eq!(next.line().await, "started");
    let waited = since.elapsed();
    assert!(
        !is_running(command) && !is_running(child),
        "beside the next"
    );
    let longest = late.allows(LEASE + A_LITTLE);
    assert!(
        waited >= left && waited < longest,
        "{left:?} {waited:?} {longest:?}"
    );
    assert_eq!(next.ended().await.0, 0);
}

#[tokio::test]
async fn when_its_keeper_is_killed_the_command_ends() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", POLITE);
    let command = number(&mut running).await;
    send("KILL", running.keeper().await).await;
    assert_eq!(running.line().await, "ended");
    let (status, errors) = running.ended().await;
    assert_eq!(status, 76);
    assert!(errors.contains("has ended"), "{errors}");
    assert!(!is_running(command));
}

#[tokio::test]
async fn when_its_keeper_is_stopped_the_command_ends_with_the_lease() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", POLITE);
    number(&mut running).await;
    let keeper = running.keeper().await;
    let next = store.client().await;
    let late = Lateness::start();
    send("STOP", keeper).await;
    // The next holder does not start before the command has its signal.
    let (line, guard) = tokio::join!(async { (running.line().await, Instant::now()) }, async {
        let guard = next.exclusive("a").wait(LONG).acquire().await.unwrap();
        (guard, Instant::now())
    });
    assert_eq!(line.0, "ended");
    assert!(
        line.1 <= guard.1 + late.allows(Duration::from_millis(300)),
        "{:?}",
        line.1 - guard.1
    );
    assert_eq!(running.ended().await.0, 76);
    ends(keeper).await;
    guard.0.release().await.unwrap();
}

#[tokio::test]
async fn when_lockctl_is_stopped_a_lost_command_is_killed() {
    let store = Store::start().await;
    let mut running = store.run("--grace=100ms", STUBBORN);
    let (child, command) = (number(&mut running).await, number(&mut running).await);
    send("STOP", running.id()).await;
    // It is renewed by the keeper.
    sleep(LEASE * 2).await;
    assert!(store.is_held("a").await && is_running(command));
    store.revoke().await;
    ends(command).await;
    ends(child).await;
    send("CONT", running.id()).await;
    assert_eq!(running.ended().await.0, 76);
}

#[tokio::test]
async fn when_lockctl_is_killed_after_a_loss_its_command_dies_at_once() {
    let store = Store::start().await;
    let mut running = store.run("--grace=1m", STUBBORN);
    let (child, command) = (number(&mut running).await, number(&mut running).await);
    store.revoke().await;
    sleep(Duration::from_secs(1)).await;
    assert!(is_running(command), "in the grace period");
    let (since, late) = (Instant::now(), Lateness::start());
    send("KILL", running.id()).await;
    ends(command).await;
    ends(child).await;
    let (waited, longest) = (since.elapsed(), late.allows(LEASE));
    assert!(waited < longest, "{waited:?} {longest:?}");
}

/// Without a word about it the keeper has to find the command, and must kill no other process.
#[tokio::test]
async fn when_lockctl_is_killed_while_it_starts_its_command_none_is_left() {
    let store = Store::start().await;
    // The search for the command takes some time.
    let path = "/none:".repeat(20_000) + &std::env::var("PATH").unwrap();
    for step in 0..4 {
        let key = step.to_string();
        let arguments = ["run", "--key", &key, "--lease=2s", "--", "sleep", "1000"];
        let mut running = spawned(store.command(&arguments).env("PATH", &path));
        eventually("it is held", || store.is_held(&key)).await;
        sleep(Duration::from_millis(4) * step).await;
        send("KILL", running.id()).await;
        // A command would keep the output open.
        let end = timeout(LONG, running.lines.next_line()).await;
        assert_eq!(end.expect("a command is left").unwrap(), None);
    }
}

/// `timeout` makes a process group of its own, where it can.
#[tokio::test]
async fn a_command_cannot_leave_its_group() {
    let store = Store::start().await;
    let command = [
        "run",
        "--key=a",
        "--lease=2s",
        "--wait=1m",
        "--",
        "timeout",
        "1000",
        "sh",
        "-c",
        POLITE,
    ];
    let mut running = store.running(&command);
    let number = number(&mut running).await;
    // It ends at once by a signal before it waits for its command.
    let leader = child_of(running.id(), "timeout").await;
    eventually("it waits", || async { state(leader) == "S" }).await;
    store.revoke().await;
    assert_eq!(running.line().await, "ended");
    assert_eq!(running.ended().await.0, 76);
    ends(number).await;
    let mut running = store.running(&command);
    let number = self::number(&mut running).await;
    send("KILL", running.id()).await;
    ends(number).await;
}

#[tokio::test]
async fn a_signal_that_nohup_ignores_stays_ignored() {
    let store = Store::start().await;
    let mut command = with_signals("nohup");
    command
        .arg(lock_tests::lockctl())
        .args(["run", "--key=a", "--", "sh", "-c"])
        .arg(POLITE)
        .env("LOCK_URL", store.server.url())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut running = spawned(&mut command);
    number(&mut running).await;
    // Would end it, and is forwarded before the next.
    send("HUP", running.id()).await;
    send("TERM", running.id()).await;
    assert_eq!(running.line().await, "ended");
    assert_eq!(running.ended().await.0, 3);
}

/// Both processes are stopped, or one is stopped and the other one killed, until the command has
/// ended after the lease.
#[tokio::test]
async fn a_command_that_has_ended_after_the_loss_is_no_success() {
    let store = Store::start().await;
    let outlives = async |key: &str, signal: &str| {
        let directory = tempfile::tempdir().unwrap();
        let end = directory.path().join("end");
        let script = format!(
            "echo $$; until [ -e {} ]; do sleep 0.05; done; echo done",
            end.display()
        );
        let arguments = ["run", "--key", key, "--lease=1s", "--", "sh", "-c", &script];
        let mut running = store.running(&arguments);
        number(&mut running).await;
        let keeper = running.keeper().await;
        send("STOP", running.id()).await;
        send(signal, keeper).await;
        eventually("its lease ends", async || !store.is_held(key).await).await;
        std::fs::write(end, "").unwrap();
        assert_eq!(running.line().await, "done");
        send("CONT", running.id()).await;
        if signal == "STOP" {
            send("CONT", keeper).await;
        }
        let (status, errors) = running.ended().await;
        assert_eq!(status, 76, "{signal}: {errors}");
    };
    tokio::join!(outlives("a", "STOP"), outlives("b", "KILL"));
}

/// The reports that it has not read are outdated when it goes on.
#[tokio::test]
async fn a_lock_that_is_held_is_not_lost_by_a_stop() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", "echo $$; sleep 7; echo done");
    number(&mut running).await;
    send("STOP", running.id()).await;
    sleep(LEASE * 2).await;
    send("CONT", running.id()).await;
    assert_eq!(running.line().await, "done");
    assert_eq!(running.ended().await.0, 0);
}

#[tokio::test]
async fn when_the_store_is_killed_the_command_ends_with_the_lease() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", POLITE);
    number(&mut running).await;
    let (since, late) = (Instant::now(), Lateness::start());
    store.server.kill();
    assert_eq!(running.line().await, "ended");
    let (waited, longest) = (since.elapsed(), late.allows(LEASE + A_LITTLE));
    assert!(waited <= longest, "{waited:?} {longest:?}");
    let (status, errors) = running.ended().await;
    assert_eq!(status, 76, "{errors}");
}

/// systemd sends SIGTERM to all processes of a service.
#[tokio::test]
async fn a_keeper_ends_with_its_command_and_not_by_sigterm() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", POLITE);
    number(&mut running).await;
    send("TERM", running.keeper().await).await;
    sleep(Duration::from_millis(200)).await;
    assert!(store.is_held("a").await);
    send("TERM", running.id()).await;
    assert_eq!(running.line().await, "ended");
    assert_eq!(running.ended().await.0, 3);
    assert!(!store.is_held("a").await);
}

#[tokio::test]
async fn a_lease_is_renewed_while_the_command_runs() {
    let store = Store::start().await;
    let mut running = store.run("--grace=10s", POLITE);
    number(&mut running).await;
    sleep(LEASE * 2).await;
    let other = store.client().await;
    other.exclusive("a").no_wait().acquire().await.unwrap_err();
    send("TERM", running.id()).await;
    assert_eq!(running.line().await, "ended");
    assert_eq!(running.ended().await.0, 3);
}
