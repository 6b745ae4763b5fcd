// Links to a head and a statistic: #L4.H5/entropy.

function readHash() {
  let name = "";
  try {
    name = decodeURIComponent(location.hash.slice(1));
  } catch {
    return; // not one of ours
  }
  const [head, statistic] = [name.split("/")[0], name.split("/").slice(1).join("/")];
  const column = study.statistics.findIndex(({ name: known }) => known === statistic);
  if (column >= 0) choose("statistic", column);
  if (study.importance && statistic === "importance") choose("statistic", IMPORTANCE);
  const place = study.heads.indexOf(head);
  if (place >= 0) showHead(place);
}

function writeHash() {
  const statistic = statisticAt(chosen.statistic)?.name;
  const parts = [study.heads[chosen.head], ...(statistic ? [encodeURIComponent(statistic)] : [])];
  history.replaceState(null, "", `#${parts.join("/")}`);
}

readHash();
addEventListener("hashchange", readHash);
for (const name of ["head", "statistic"]) listeners[name].push(writeHash);
