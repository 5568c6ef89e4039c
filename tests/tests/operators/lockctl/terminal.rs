//! A command at a terminal: Ctrl-C, Ctrl-Z, and a terminal that closes.

use std::{process::Stdio, time::Duration};

use lock_runtime::{LockErrorKind, Loss};
use lock_tests::{
    Proxy,
    place::{LONG, eventually},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, ChildStdin, ChildStdout},
    time::{Instant, sleep, timeout},
};

use super::{Store, child_of, ends, is_running, send, stat, state, with_signals};

/// A program at a terminal of its own, which `script` makes.
struct Terminal {
    script: Child,
    keys: ChildStdin,
    screen: ChildStdout,
    shown: String,
}

impl Terminal {
    fn open(store: &Store, command: &str) -> Self {
        let mut script = with_signals("script")
            .args(["-qec", command, "/dev/null"])
            .env("LOCK_URL", store.server.url())
            .env("LOCKCTL", lock_tests::lockctl())
            .env("SHELL", "/bin/sh")
            .env("PS1", "$ ")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self {
            keys: script.stdin.take().unwrap(),
            screen: script.stdout.take().unwrap(),
            script,
            shown: String::new(),
        }
    }

    /// An interactive shell, which has shown its prompt.
    async fn shell(store: &Store) -> Self {
        let mut shell = Self::open(store, "exec bash --norc --noprofile -i");
        shell.shows("$ ").await;
        shell
    }

    async fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).await.unwrap();
        self.keys.flush().await.unwrap();
    }

    /// Waits until the screen shows a text behind the last one. Returns the text before it.
    async fn shows(&mut self, text: &str) -> String {
        let until = Instant::now() + LONG;
        loop {
            if let Some((before, rest)) = self.shown.split_once(text) {
                let before = before.to_owned();
                self.shown = rest.to_owned();
                return before;
            }
            let mut bytes = [0; 1024];
            let read = timeout(until - Instant::now(), self.screen.read(&mut bytes)).await;
            let read = read
                .unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.shown))
                .unwrap();
            assert!(read > 0, "it has ended without {text:?}: {:?}", self.shown);
            self.shown += &String::from_utf8_lossy(&bytes[..read]);
        }
    }

    async fn number(&mut self) -> u32 {
        self.shows("number=").await;
        self.shows("\r").await.trim().parse().unwrap()
    }
}

fn is_stopped(process: u32) -> bool {
    state(process) == "T"
}

/// Waits until a command that reads from the terminal has it. One that asks for it too early is
/// continued, by a signal that would undo a Ctrl-Z.
async fn reads(process: u32) {
    let has_terminal = || stat(process, 5) == Some(process.to_string());
    let reads = || async { has_terminal() && state(process) == "S" };
    eventually("it reads", reads).await;
}

#[tokio::test]
async fn ctrl_c_reaches_the_command_and_the_lock_is_released() {
    let store = Store::start().await;
    let command = "exec $LOCKCTL run --key=a -- sh -c 'echo number=$$; read line; echo got $line; sleep 1000'";
    let mut terminal = Terminal::open(&store, command);
    let number = terminal.number().await;
    // The command has the terminal, or this would stop it.
    terminal.press("hello\r").await;
    terminal.shows("got hello").await;
    assert!(store.is_held("a").await);
    child_of(number, "sleep").await;
    terminal.press("\u{3}").await;
    let status = timeout(LONG, terminal.script.wait()).await.unwrap();
    assert_eq!(status.unwrap().code(), Some(130));
    ends(number).await;
    assert!(!store.is_held("a").await);
}

#[tokio::test]
async fn ctrl_z_stops_the_command_and_keeps_the_lock() {
    let store = Store::start().await;
    let mut terminal = Terminal::shell(&store).await;
    let command = "$LOCKCTL run --key=a --lease=2s -- sh -c 'echo num''ber=$$; read line; echo got $line; exit 5'\r";
    terminal.press(command).await;
    let number = terminal.number().await;
    reads(number).await;
    terminal.press("\u{1a}").await;
    terminal.shows("Stopped").await;
    eventually("it is stopped", || async { is_stopped(number) }).await;
    sleep(Duration::from_secs(4)).await;
    assert!(store.is_held("a").await && is_running(number));
    terminal.press("fg\r").await;
    eventually("it goes on", || async { !is_stopped(number) }).await;
    terminal.press("hello\r").await;
    terminal.shows("got hello").await;
    terminal.shows("$ ").await;
    terminal.press("echo status=$?\r").await;
    terminal.shows("status=5").await;
    assert!(!store.is_held("a").await);
    terminal.press("exit\r").await;
}

#[tokio::test]
async fn in_the_background_a_command_that_reads_the_terminal_stops() {
    let store = Store::start().await;
    let mut terminal = Terminal::shell(&store).await;
    let script = "echo num''ber=$$; while read line; do echo got $line; done; exit 5";
    let command = format!("$LOCKCTL run --key=a -- sh -c '{script}'\r");
    terminal.press(&command).await;
    let number = terminal.number().await;
    reads(number).await;
    terminal.press("\u{1a}").await;
    terminal.shows("Stopped").await;
    terminal.press("bg\r").await;
    // It would be stopped and continued without an end.
    terminal
        .press("until jobs -s | grep .; do sleep 0.1; done\r")
        .await;
    terminal.shows("Stopped").await;
    terminal.press("fg\r").await;
    eventually("it goes on", || async { !is_stopped(number) }).await;
    terminal.press("hello\r").await;
    terminal.shows("got hello").await;
    terminal.press("\u{4}").await;
    terminal.shows("$ ").await;
    terminal.press("echo status=$?\r").await;
    terminal.shows("status=5").await;
    assert!(!store.is_held("a").await);
}

/// The terminal stays with the shell, as the output is not the terminal.
#[tokio::test]
async fn ctrl_z_stops_a_command_without_the_terminal() {
    let store = Store::start().await;
    let mut terminal = Terminal::shell(&store).await;
    let directory = tempfile::tempdir().unwrap();
    let end = directory.path().join("end");
    let script = format!(
        "echo num''ber=$$ >&2; until [ -e {} ]; do sleep 0.05; done; exit 5",
        end.display()
    );
    let command = format!("$LOCKCTL run --key=a --lease=2s -- sh -c '{script}' >/dev/null\r");
    terminal.press(&command).await;
    terminal.number().await;
    terminal.press("\u{1a}").await;
    terminal.shows("Stopped").await;
    sleep(Duration::from_secs(4)).await;
    assert!(store.is_held("a").await);
    std::fs::write(end, "").unwrap();
    terminal.press("fg\r").await;
    terminal.shows("$ ").await;
    terminal.press("echo status=$?\r").await;
    terminal.shows("status=5").await;
}

/// The system does not stop a script without a shell above it, which could not be continued.
#[tokio::test]
async fn ctrl_z_does_not_stop_a_script_that_no_shell_could_continue() {
    let store = Store::start().await;
    let command = "echo num''ber=$$; $LOCKCTL run --key=a --lease=2s -- sleep 3; echo after=$?";
    let mut terminal = Terminal::open(&store, command);
    terminal.number().await;
    eventually("it is held", || async { store.is_held("a").await }).await;
    sleep(Duration::from_millis(300)).await;
    terminal.press("\u{1a}").await;
    terminal.shows("after=0").await;
    assert!(!store.is_held("a").await);
}

#[tokio::test]
async fn a_revocation_asks_at_the_terminal() {
    let store = Store::start().await;
    let locks = store.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    for (answer, status) in [("n\r", 1), ("\r", 1), ("y\r", 0)] {
        guard.verify().await.unwrap();
        let mut terminal = Terminal::open(&store, "exec $LOCKCTL revoke a");
        terminal.shows("a is held").await;
        terminal.shows("[y/N] ").await;
        terminal.press(answer).await;
        if status == 0 {
            terminal.shows(": revoked").await;
        }
        let ended = timeout(LONG, terminal.script.wait()).await.unwrap();
        assert_eq!(ended.unwrap().code(), Some(status), "{answer:?}");
    }
    let lost = guard.lost().await;
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Revoked));
}

#[tokio::test]
async fn a_revocation_without_a_reply_may_have_happened() {
    let store = Store::start().await;
    let locks = store.client().await;
    let _guard = locks.exclusive("a").acquire().await.unwrap();
    let proxy = Proxy::to(&store.server).await;
    let command = format!("exec $LOCKCTL --url {} revoke a", proxy.url());
    let mut terminal = Terminal::open(&store, &command);
    terminal.shows("[y/N]").await;
    proxy.drop_all_replies();
    terminal.press("y\r").await;
    terminal.shows("not known whether it was revoked").await;
    let status = timeout(LONG, terminal.script.wait()).await.unwrap();
    assert_eq!(status.unwrap().code(), Some(69));
}

/// A holder that was not shown is not revoked.
#[tokio::test]
async fn a_lock_that_changes_hands_while_it_asks_is_not_revoked() {
    let store = Store::start().await;
    let locks = store.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let mut terminal = Terminal::open(&store, "exec $LOCKCTL revoke a");
    terminal.shows("[y/N] ").await;
    guard.release().await.unwrap();
    let next = locks.exclusive("a").acquire().await.unwrap();
    terminal.press("y\r").await;
    terminal.shows("no longer has the lock").await;
    let ended = timeout(LONG, terminal.script.wait()).await.unwrap();
    assert_eq!(ended.unwrap().code(), Some(1));
    next.verify().await.unwrap();
}

#[tokio::test]
async fn when_the_terminal_closes_the_command_ends_and_the_lock_is_released() {
    let store = Store::start().await;
    let command = "exec $LOCKCTL run --key=a -- sh -c 'echo number=$$; sleep 1000'";
    let mut terminal = Terminal::open(&store, command);
    let number = terminal.number().await;
    send("KILL", terminal.script.id().unwrap()).await;
    ends(number).await;
    eventually("the lock is free", || async { !store.is_held("a").await }).await;
}

/// The command may go on, as with nohup(1); its lock goes on as well.
#[tokio::test]
async fn a_command_that_ignores_the_end_of_its_terminal_keeps_its_lock() {
    let store = Store::start().await;
    let directory = tempfile::tempdir().unwrap();
    let arrived = directory.path().join("arrived");
    let script = "trap \": >$FILE\" HUP; echo number=$$; while :; do sleep 0.05; done";
    let command = format!(
        "export FILE={}; exec $LOCKCTL run --key=a -- sh -c '{script}'",
        arrived.display()
    );
    let mut terminal = Terminal::open(&store, &command);
    let number = terminal.number().await;
    send("KILL", terminal.script.id().unwrap()).await;
    eventually("the signal arrives", || async { arrived.exists() }).await;
    sleep(Duration::from_millis(200)).await;
    assert!(is_running(number) && store.is_held("a").await);
    send("KILL", number).await;
    ends(number).await;
    eventually("the lock is free", || async { !store.is_held("a").await }).await;
}

/// A command that waits for a terminal that it does not have, and nothing but a signal can end.
async fn waits_for_terminal(store: &Store) -> (Terminal, u32) {
    let mut terminal = Terminal::shell(store).await;
    let script = "echo num''ber=$$; read line; echo got $line";
    let command = format!("$LOCKCTL run --key=a --lease=2s -- sh -c '{script}' | cat\r");
    terminal.press(&command).await;
    let number = terminal.number().await;
    eventually("it is stopped", || async { is_stopped(number) }).await;
    sleep(Duration::from_secs(3)).await;
    assert!(store.is_held("a").await && is_stopped(number));
    (terminal, number)
}

#[tokio::test]
async fn ctrl_c_ends_a_command_that_waits_for_the_terminal() {
    let store = Store::start().await;
    let (mut terminal, number) = waits_for_terminal(&store).await;
    terminal.press("\u{3}").await;
    ends(number).await;
    terminal.shows("$ ").await;
    assert!(!store.is_held("a").await);
}

#[tokio::test]
async fn each_signal_that_ends_programs_ends_a_stopped_command() {
    let store = Store::start().await;
    for signal in ["HUP", "INT", "QUIT", "TERM"] {
        let (mut terminal, number) = waits_for_terminal(&store).await;
        let runner = stat(number, 1).unwrap().parse().unwrap();
        send(signal, runner).await;
        ends(number).await;
        ends(runner).await;
        assert!(!store.is_held("a").await, "{signal}");
        terminal.press("exit\r").await;
    }
    // Stopped by another process.
    let (mut terminal, _) = waits_for_terminal(&store).await;
    terminal.press("\u{3}").await;
    terminal.shows("$ ").await;
    let command = "$LOCKCTL run --key=a -- sh -c 'echo num''ber=$$; exec sleep 1000' | cat\r";
    terminal.press(command).await;
    let number = terminal.number().await;
    send("STOP", number).await;
    eventually("it is stopped", || async { is_stopped(number) }).await;
    terminal.press("\u{3}").await;
    ends(number).await;
    terminal.shows("$ ").await;
    assert!(!store.is_held("a").await);
}

#[tokio::test]
async fn a_terminal_that_closes_ends_a_command_that_waits_for_it() {
    let store = Store::start().await;
    let (terminal, number) = waits_for_terminal(&store).await;
    send("KILL", terminal.script.id().unwrap()).await;
    ends(number).await;
    eventually("the lock is free", || async { !store.is_held("a").await }).await;
}

#[tokio::test]
async fn the_locks_of_a_prefix_are_revoked_after_a_question() {
    let store = Store::start().await;
    let locks = store.client().await;
    let acquire = async |key: &str| locks.exclusive(key).acquire().await.unwrap();
    let (one, two, other) = (
        acquire("test:1").await,
        acquire("test:2").await,
        acquire("job").await,
    );
    for (answer, status) in [("n\r", 1), ("y\r", 0)] {
        let mut terminal = Terminal::open(&store, "exec $LOCKCTL revoke --prefix test:");
        terminal.shows("2 locks whose names begin with").await;
        terminal.shows("[y/N] ").await;
        terminal.press(answer).await;
        if status == 0 {
            terminal.shows("revoked").await;
            terminal.shows("revoked").await;
        }
        let ended = timeout(LONG, terminal.script.wait()).await.unwrap();
        assert_eq!(ended.unwrap().code(), Some(status), "{answer:?}");
    }
    for guard in [one, two] {
        let lost = guard.lost().await;
        assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Revoked));
    }
    other.verify().await.unwrap();
    let refused = store.ended(&["revoke", "--prefix", "test:"]).await;
    assert_eq!(refused.status, 2, "{refused:?}");
}
