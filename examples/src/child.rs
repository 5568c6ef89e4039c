//! Child processes of the same binary: several real processes on one machine.
//!
//! Parent and child exchange lines over the child's standard input and output. Only the parent
//! holds the other end of the input: when it is closed, because the parent is done or has died,
//! the child terminates.

use std::{
    ffi::OsStr,
    fmt,
    io::{self, Write},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines, stdin},
    process::{ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// The time within which a child must terminate after its input was closed. After that it is
/// killed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running process of the same binary. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    process: tokio::process::Child,
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts this binary again, with `args`. Its standard error is that of the parent.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find the file of this program")?;
        let mut process = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal reaches a whole process group, but only the parent should end
            // the children.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a child process")?;
        let (Some(orders), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("a child process has no pipes");
        };
        Ok(Self {
            process,
            orders,
            lines: BufReader::new(output).lines(),
        })
    }

    /// Reads the next line of the child.
    ///
    /// # Errors
    /// If the child terminates instead. The reason is on standard error.
    pub async fn line(&mut self) -> anyhow::Result<String> {
        match self
            .lines
            .next_line()
            .await
            .context("cannot read from a child process")?
        {
            Some(line) => Ok(line),
            None => bail!(
                "a child process ended before its time: {}",
                self.process.wait().await?
            ),
        }
    }

    /// Sends a line to the child.
    ///
    /// # Errors
    /// If the child has ended.
    pub async fn tell(&mut self, order: &str) -> anyhow::Result<()> {
        let sent = self.orders.write_all(format!("{order}\n").as_bytes()).await;
        sent.context("a child process ended before its time")
    }

    /// Closes the child's input and waits until it has terminated. Returns its last line, if
    /// there is one.
    ///
    /// # Errors
    /// If the child fails, or does not end within 30 s; then it is killed.
    pub async fn end(self) -> anyhow::Result<Option<String>> {
        let Self {
            mut process,
            orders,
            mut lines,
        } = self;
        drop(orders);
        let parting = async {
            let mut last = None;
            while let Some(line) = lines.next_line().await? {
                last = Some(line);
            }
            Ok::<_, io::Error>((last, process.wait().await?))
        };
        let (last, status) = timeout(PATIENCE, parting)
            .await
            .context("a child process does not end")??;
        if !status.success() {
            bail!("a child process failed: {status}");
        }
        Ok(last)
    }
}

/// In a child: sends a line to the parent. A parent that has terminated is not an error.
pub fn say(line: impl fmt::Display) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// In a child: reads the next line of the parent. `None` if the parent has closed the input.
///
/// # Errors
/// If standard input cannot be read.
pub async fn order() -> anyhow::Result<Option<String>> {
    BufReader::new(stdin())
        .lines()
        .next_line()
        .await
        .context("cannot read orders")
}

/// In a child: waits until the parent closes the child's input or terminates.
pub async fn parent_hangs_up() {
    // Input that cannot be read is treated like closed input.
    let _ = stdin().read_to_end(&mut Vec::new()).await;
}
