//! The tests that reach a mutant, and whether one notices it.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::copy::Copy;

/// Tests of one kind, the cheap ones first: what one stage has noticed, the later ones leave out.
pub(crate) struct Stage {
    pub(crate) name: &'static str,
    /// What `cargo test` builds.
    build: &'static [&'static str],
    /// Parts of the names of its tests.
    only: &'static [&'static str],
    /// Parts of the names of tests that are left out.
    skip: &'static [&'static str],
}

/// The longest time for one test.
const LIMIT: Duration = Duration::from_secs(180);

const UNITS: &[&str] = &["-p", "lock-runtime", "-p", "lock-tower", "--lib"];

pub(crate) const STAGES: [Stage; 5] = [
    Stage {
        name: "unit",
        build: UNITS,
        only: &[""],
        skip: &["sim::", "fuzz::"],
    },
    Stage {
        name: "simulators",
        build: UNITS,
        only: &["sim::"],
        skip: &["mutations", "edits"],
    },
    Stage {
        name: "api",
        build: &["-p", "lock-tests", "--test", "api", "--test", "tower"],
        only: &[""],
        skip: &[],
    },
    Stage {
        name: "stores",
        build: &["-p", "lock-tests", "--test", "stores"],
        only: &[""],
        skip: &[],
    },
    Stage {
        name: "topologies",
        build: &["-p", "lock-tests", "--test", "topologies"],
        only: &[""],
        skip: &["modes::"],
    },
];

/// What the tests say of a mutant.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A test failed, named here, or the tests ended or hung.
    Noticed(String),
    Unnoticed,
    Unreached,
}

/// A test, with the time that it took without a mutant.
struct Test<'a> {
    executable: &'a Executable,
    name: String,
    took: Duration,
}

struct Executable {
    path: PathBuf,
    package: PathBuf,
}

impl Executable {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .env("RUST_BACKTRACE", "0")
            .env("LOCK_EXPLORER_SCHEDULES", "1000")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command
    }
}

impl Stage {
    /// Runs the tests for each of the mutants; `report` gets the outcomes.
    pub(crate) fn run(
        &self,
        copy: &Copy,
        mutants: &[usize],
        seconds: u64,
        mut report: impl FnMut(usize, Outcome) -> Result<()>,
    ) -> Result<()> {
        let executables = self.executables(copy)?;
        let folder = copy.beside("reached").join(self.name);
        fs::create_dir_all(&folder)?;
        let mut names = Vec::new();
        for executable in &executables {
            for name in self.names(executable)? {
                names.push((executable, name));
            }
        }
        let records = Mutex::new(Vec::new());
        side_by_side(names.len(), |index| {
            let (executable, name) = &names[index];
            match recorded(executable, name, &folder) {
                Ok(Some(record)) => locked(&records).push((index, record)),
                Ok(None) => println!("left out, as it fails without a mutant: {name}"),
                Err(error) => println!("left out: {name}: {error}"),
            }
        });
        let mut tests = Vec::new();
        let mut reaching: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut records = records.into_inner().unwrap_or_else(PoisonError::into_inner);
        // The shortest test comes first.
        records.sort_by_key(|(_, record)| record.took);
        for (index, record) in records {
            for mutant in record.reached {
                reaching.entry(mutant).or_default().push(tests.len());
            }
            let (executable, name) = &names[index];
            tests.push(Test {
                executable,
                name: name.clone(),
                took: record.took,
            });
        }
        let (sender, outcomes) = mpsc::channel();
        thread::scope(|scope| {
            let (tests, reaching) = (&tests, &reaching);
            scope.spawn(move || {
                side_by_side(mutants.len(), |index| {
                    let mutant = mutants[index];
                    let list = reaching.get(&mutant).map_or(&[][..], Vec::as_slice);
                    let outcome = judged(mutant, list.iter().map(|&at| &tests[at]), seconds);
                    let _ = sender.send((mutant, outcome));
                });
            });
            outcomes
                .iter()
                .try_for_each(|(mutant, outcome)| report(mutant, outcome?))
        })
    }

    fn executables(&self, copy: &Copy) -> Result<Vec<Executable>> {
        let arguments = [&["test", "--no-run"], self.build].concat();
        let output = copy.cargo(&arguments).stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "the tests do not compile");
        let mut executables = Vec::new();
        for line in String::from_utf8(output.stdout)?.lines() {
            let message: Value = serde_json::from_str(line)?;
            if message["profile"]["test"] == true
                && let Some(path) = message["executable"].as_str()
            {
                let manifest = message["manifest_path"].as_str().context("a manifest")?;
                executables.push(Executable {
                    path: path.into(),
                    package: Path::new(manifest).parent().context("a package")?.into(),
                });
            }
        }
        Ok(executables)
    }

    fn names(&self, executable: &Executable) -> Result<Vec<String>> {
        let mut command = executable.command();
        let output = command.args(["--list", "--format=terse"]).output()?;
        let chosen = |name: &&str| {
            self.only.iter().any(|part| name.contains(part))
                && !self.skip.iter().any(|part| name.contains(part))
        };
        let names = String::from_utf8(output.stdout)?;
        let names = names.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.filter(chosen).map(str::to_owned).collect())
    }
}

struct Record {
    took: Duration,
    reached: Vec<usize>,
}

/// Runs a test without a mutant, and returns those that it reaches, or `None` if it fails.
fn recorded(executable: &Executable, name: &str, folder: &Path) -> Result<Option<Record>> {
    let package = executable.package.file_name().unwrap_or_default().display();
    let file = format!("{package}.{}", name.replace("::", "."));
    let (path, took) = (folder.join(&file), folder.join(format!("{file}.took")));
    if !took.exists() {
        let _ = fs::remove_file(&path);
        let begun = Instant::now();
        let mut command = executable.command();
        command
            .args(["--exact", name])
            .env("LOCK_MUTANTS_RECORD", &path);
        let text = match failure(&mut command, LIMIT)? {
            None => begun.elapsed().as_millis().to_string(),
            Some(_) => String::new(),
        };
        fs::write(&took, text)?;
    }
    let Ok(millis) = fs::read_to_string(&took)?.parse() else {
        return Ok(None);
    };
    let reached = fs::read_to_string(path).unwrap_or_default();
    let mut reached = reached
        .lines()
        .map(str::parse)
        .collect::<Result<Vec<_>, _>>()?;
    // A process of the test reaches some of them again.
    reached.sort_unstable();
    reached.dedup();
    Ok(Some(Record {
        took: Duration::from_millis(millis),
        reached,
    }))
}

/// Runs tests with a mutant until one notices it.
fn judged<'a>(
    mutant: usize,
    tests: impl Iterator<Item = &'a Test<'a>>,
    seconds: u64,
) -> Result<Outcome> {
    let mut left = Duration::from_secs(seconds);
    let mut of_executables: Vec<(&Executable, Vec<&str>)> = Vec::new();
    for test in tests {
        if left < test.took {
            break;
        }
        left -= test.took;
        match (of_executables.iter_mut()).find(|(it, _)| it.path == test.executable.path) {
            Some((_, names)) => names.push(&test.name),
            None => of_executables.push((test.executable, vec![&test.name])),
        }
    }
    if of_executables.is_empty() {
        return Ok(Outcome::Unreached);
    }
    let limit = Duration::from_secs(10 + 3 * seconds);
    for (executable, names) in of_executables {
        let run = |names: &[&str], mutant: Option<usize>| {
            let mut command = executable.command();
            command.args(["--exact", "--test-threads=4"]).args(names);
            command.envs(mutant.map(|number| ("LOCK_MUTANT", number.to_string())));
            failure(&mut command, limit)
        };
        if let Some(by) = run(&names, Some(mutant))? {
            let again = match names.contains(&&*by) {
                true => &[&*by][..],
                false => &names,
            };
            // A test may fail because of the load.
            if run(again, None)?.is_none() && run(again, Some(mutant))?.is_some() {
                return Ok(Outcome::Noticed(by));
            }
        }
    }
    Ok(Outcome::Unnoticed)
}

/// Runs tests until one fails, and returns its name, or how they ended.
fn failure(command: &mut Command, limit: Duration) -> Result<Option<String>> {
    let mut child = command.spawn()?;
    let output = BufReader::new(child.stdout.take().context("an output")?);
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let lines = output.split(b'\n').map_while(Result::ok);
        lines.for_each(|line| drop(sender.send(String::from_utf8_lossy(&line).into_owned())));
    });
    let deadline = Instant::now() + limit;
    let by = loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let failed = line.strip_suffix(" ... FAILED");
                if let Some(name) = failed.and_then(|name| name.strip_prefix("test ")) {
                    break name.to_owned();
                }
            }
            Err(RecvTimeoutError::Timeout) => break "a time-out".to_owned(),
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait()?;
                return Ok((!status.success()).then(|| status.to_string()));
            }
        }
    };
    // The servers and processes of its tests end with it.
    child.kill()?;
    child.wait()?;
    Ok(Some(by))
}

/// Calls `work` with each index, in twice as many threads as there are cores: tests wait often.
fn side_by_side(count: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let cores = thread::available_parallelism().map_or(1, Into::into);
    thread::scope(|scope| {
        for _ in 0..2 * cores {
            scope.spawn(|| {
                while let index = next.fetch_add(1, Relaxed)
                    && index < count
                {
                    work(index);
                }
            });
        }
    });
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
