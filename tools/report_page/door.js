"use strict";
// The token comes in the part of the address that browsers keep to themselves, and leaves it at once.
const enter = async (token) => {
  history.replaceState(null, "", "/");
  const answer = await fetch("/enter", { method: "POST", body: token });
  if (answer.ok) location.reload();
  else document.getElementById("said").textContent = "This is not the token of this slime watch.";
};
document.getElementById("form").addEventListener("submit", (event) => { event.preventDefault(); enter(document.getElementById("token").value); });
if (location.hash.startsWith("#token=")) enter(location.hash.slice(7));
