//! The entry point that all examples share.

use std::{io, process::ExitCode};

use tokio::signal::unix::{SignalKind, signal};

/// Runs a story. An error is printed as one line on standard error, with a failing exit code.
pub fn start(name: &str, story: impl Future<Output = anyhow::Result<ExitCode>>) -> ExitCode {
    // `rediss://` needs a crypto provider, chosen by the application. This fails only if there
    // already is one.
    #[cfg(feature = "redis-rustls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    let ended = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(story));
    ended.unwrap_or_else(|error| {
        eprintln!("{name}: {}", in_one_line(&error));
        ExitCode::FAILURE
    })
}

/// Returns the error and its causes in one line, without causes that the error itself quotes.
fn in_one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line.push_str(": ");
            line.push_str(&cause);
        }
    }
    line
}

/// Returns a future that resolves when an operator or an orchestrator stops the server, by Ctrl-C
/// or SIGTERM. A signal counts from the call on, and not only once the future is polled.
///
/// # Errors
/// If the process cannot listen for signals.
pub fn stopped() -> io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupted.recv() => {}
            _ = terminated.recv() => {}
        }
    })
}

/// Returns a name for the keys of this run, so that runs that share a server do not interfere,
/// and each can count the keys that it has left behind.
pub fn run_id(name: &str) -> String {
    format!("{name}-{:08x}", rand::random::<u32>())
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_cause_that_the_error_quotes_is_printed_once() {
        let error = Err::<(), _>(std::io::Error::other("refused"))
            .context("no connection: refused")
            .context("stuck");
        assert_eq!(
            in_one_line(&error.unwrap_err()),
            "stuck: no connection: refused"
        );
    }
}
